# SPDX-License-Identifier: Apache-2.0
"""How a benchmark ends where a part of what it ran has failed: after the other parts, and not with 0."""

import sys
from collections.abc import Sequence


class NotMeasured(RuntimeError):
    """What was to be measured did not come; says why."""


def refuse_failed(failed: Sequence[str]) -> None:
    """End with 1 and a line that names those that failed, and says of each how and where to look, where any did."""
    if failed:
        sys.exit(f"error: {'; '.join(failed)}")
