"""The task that waits for an iteration's scores."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.actors.reward_group import PendingScores, RewardGroup, Scores
from tasks.actors.rollout_group import PendingBatch
from tasks.system.stopwatch import Stopwatch


@task(name="reward", cache_policy=NO_CACHE, persist_result=False)
def finish_reward(clock: Stopwatch, group: RewardGroup, batches: list[PendingBatch], pending: PendingScores) -> Scores:
    """Wait until every batch is scored; see `RewardPool.collect` for the errors."""
    with clock.stage("reward"):
        return group.table(batches, pending)
