# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's executor for a model that is spread over several processes, without a race that loses pictures."""

from typing import Any

from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor


class BatchExecutor(MultiprocDiffusionExecutor):
    """Gives every request of a batch its output, whichever of two threads is faster.

    One thread learns that a batch is computed and notes which requests it was made of. Another one gets the batch's
    output: it looks for that note, unpacks the output, and without a note keeps it for the first thread. vLLM-Omni
    0.30 loses an output whose note is made during the unpacking: its requests wait until they time out. So the note
    is looked for once more, under the lock that both threads take.
    """

    def _finish_output(self, async_output_id: str, result: Any, exc: BaseException | None) -> None:
        requests = self._batch_split_map.pop(async_output_id, None)
        if requests is None:
            super()._finish_output(async_output_id, result, exc)
        else:
            self._deliver_batch_split(requests, result, None if exc is None else str(exc))
