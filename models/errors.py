# SPDX-License-Identifier: Apache-2.0
"""What all errors of this project have in common."""


class DoubleflowError(Exception):
    """An error whose message is for the user: one sentence, what is wrong and what would be right.

    Each class has a built-in error as its second base, and that says whose fault it is: `ValueError` is raised for what
    was given (a setting, a file, a prompt), `RuntimeError` for what happened to a run that was asked for correctly. The
    command line shows the message without a traceback, and ends with 2 for the first kind and 1 for the second.
    """
