# SPDX-License-Identifier: Apache-2.0
"""Whether an error came from a full disk. Imports nothing that takes time."""

from models.errors import causes, out_of_room


def full_disk(error: BaseException | None) -> OSError | None:
    """The error among its causes, also of those that Ray brings from an actor, which says that a disk is full."""
    for found in causes(error):
        if (full := out_of_room(getattr(found, "cause", found))) is not None:
            return full
    return None
