# SPDX-License-Identifier: Apache-2.0
"""The task that waits for an iteration's scores."""

from collections.abc import Callable, Sequence

from tasks.actors.reward_group import PendingScores, RewardGroup, Scores
from tasks.actors.rollout_group import PendingBatch
from tasks.stages.stage import stage


@stage("reward")
def finish_reward(
    group: RewardGroup,
    batches: Sequence[PendingBatch],
    pending: PendingScores,
    meanwhile: Callable[[], None] | None = None,
) -> Scores:
    """Wait until every batch is scored; see `RewardPool.collect` for the errors. What is done `meanwhile` may wait for
    some of the scores."""
    if meanwhile is not None:
        meanwhile()
    return group.table(batches, pending)
