"""The task that waits for an iteration's samples."""

import ray
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.actors.rollout_group import PendingBatch
from tasks.system.stopwatch import Stopwatch


@task(name="rollout", cache_policy=NO_CACHE, persist_result=False)
def finish_rollout(clock: Stopwatch, batches: list[PendingBatch], stage: str = "gen") -> float:
    """Wait until every batch is sampled; a worker's error is raised here. Returns the workers' busy seconds."""
    with clock.stage(stage):
        return sum(ray.get([batch.seconds for batch in batches]))
