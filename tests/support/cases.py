# SPDX-License-Identifier: Apache-2.0
"""Cases of two parameters: every value of each is in `make check`, every pair of them in `make test`."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def crossed(firsts: Iterable[str], seconds: Mapping[str, Any], slow: Collection[str] = ()) -> list[Any]:
    """Every name of `firsts` with every value of `seconds`, as `pytest.param(name, value)`.

    The first name is quick with the first value, the second with the second one, and so on around: of every name and,
    where there are as many names, of every value there is a quick case. The others are marked `slow`, and so is every
    case of the names in `slow`.
    """
    return [
        pytest.param(
            name,
            value,
            id=f"{name}-{key}",
            marks=[pytest.mark.slow] if name in slow or (place - number) % len(seconds) else [],
        )
        for place, name in enumerate(firsts)
        for number, (key, value) in enumerate(seconds.items())
    ]
