# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a reward that a run was set up with."""

from models.errors import DoubleflowError


class RewardError(DoubleflowError, ValueError):
    """A reward is unknown, was given unusable options, or was asked to score what it cannot.

    It is a mistake of the run's set-up: it ends the run and is not tried again. Any other error of a reward is a
    failure, after which its scores are missing.
    """
