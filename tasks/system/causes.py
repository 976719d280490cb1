# SPDX-License-Identifier: Apache-2.0
"""What an error came from. Imports nothing that takes time."""

from collections.abc import Iterator

from models.errors import out_of_room


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and so on to the first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # one that was raised again may have its own consequence as a cause
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def full_disk(error: BaseException | None) -> OSError | None:
    """The error among its causes, also of those that Ray brings from an actor, which says that a disk is full."""
    for found in causes(error):
        if (full := out_of_room(getattr(found, "cause", found))) is not None:
            return full
    return None
