# SPDX-License-Identifier: Apache-2.0
"""The task that waits for an iteration's samples."""

from collections.abc import Sequence

from tasks.actors.rollout_group import PendingBatch
from tasks.actors.waiting import get
from tasks.stages.stage import stage


def wait_until_sampled(batches: Sequence[PendingBatch]) -> float:
    """Wait until every batch is sampled; a worker's error is raised here. Returns the workers' busy seconds."""
    return sum(get([batch.seconds for batch in batches]))


finish_rollout = stage("gen", "rollout")(wait_until_sampled)
finish_rollout_ahead = stage("gen_ahead", "rollout")(wait_until_sampled)
"""The same for the next iteration's samples, whose seconds are counted apart."""
