# SPDX-License-Identifier: Apache-2.0
"""What all errors of this project have in common, and which of the system's errors tell of a full disk."""

import errno
from typing import TypeGuard

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class DoubleflowError(Exception):
    """An error whose message is for the user: one sentence, what is wrong and what would be right.

    Each class has a built-in error as its second base, and that says whose fault it is: `ValueError` is raised for what
    was given (a setting, a file, a prompt), `RuntimeError` for what happened to a run that was asked for correctly. The
    command line shows the message without a traceback, and ends with 2 for the first kind and 1 for the second.
    """


def is_out_of_room(error: object) -> TypeGuard[OSError]:
    """Does the system say that the disk is full, or that the user's share of it is?"""
    return isinstance(error, OSError) and error.errno in NO_ROOM
