# SPDX-License-Identifier: Apache-2.0
"""Which worker takes the next batch."""

import ray

from tasks.actors.waiting import wait


class Router:
    """Gives each batch to the worker with the fewest unfinished ones, and no worker more than it may queue.

    Args:
        workers: how many.
        max_queued: batches that one worker may have unfinished.
    """

    def __init__(self, workers: int, max_queued: int):
        self.max_queued = max_queued
        self._unfinished: list[list[ray.ObjectRef]] = [[] for _ in range(workers)]

    def next_free(self) -> int:
        """The worker for the next batch; waits until one has a free place. A batch that failed is finished."""
        self._forget(0)
        while min(map(len, self._unfinished)) >= self.max_queued:
            self._forget(1)
        return min(range(len(self._unfinished)), key=lambda worker: len(self._unfinished[worker]))

    def assign(self, worker: int, finished: ray.ObjectRef) -> None:
        """Give `worker` a batch, whose result is ready when it is done."""
        self._unfinished[worker].append(finished)

    def _forget(self, count: int) -> None:
        """Drop the batches that are finished, once so many are."""
        waiting = [batch for queue in self._unfinished for batch in queue]
        if not waiting:
            return
        done = wait(waiting, count)
        self._unfinished = [[batch for batch in queue if batch not in done] for queue in self._unfinished]
