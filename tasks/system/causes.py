# SPDX-License-Identifier: Apache-2.0
"""What an error came from. Imports nothing that takes time."""

from collections.abc import Iterator


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and so on to the first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # one that was raised again may have its own consequence as a cause
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__
