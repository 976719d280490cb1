# SPDX-License-Identifier: Apache-2.0
"""The executor of several processes: no output of a batch is lost."""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.executor import multiproc_executor
from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput

from models.rollout.vllm_omni.executor import BatchExecutor


def waiting_for(kind: type, request: str, monkeypatch: pytest.MonkeyPatch) -> Future:
    """A request's future, after its batch's output came while the batch was being noted down; no process is started."""
    executor = object.__new__(kind)
    executor._futures_lock, executor._pump_stop = threading.RLock(), threading.Event()
    executor._output_futures, executor._completed_outputs, executor._batch_split_map = {}, {}, {}
    executor._dropped_output_ids, executor._closed, executor._is_failed = OrderedDict(), False, False
    results = [DiffusionOutput(output=torch.full((2,), float(number))) for number in range(2)]
    batch = [RunnerOutput(name, None, True, result) for name, result in zip(("a", "b"), results, strict=True)]
    message = multiproc_executor.AsyncDiffusionOutput(
        kind=multiproc_executor.AsyncOutputKind.OUTPUT_READY,
        async_output_id="batch",
        output=BatchRunnerOutput.from_list(batch),
    )

    def dequeue(timeout: float) -> object:
        executor._pump_stop.set()
        return message

    def noted_meanwhile(_: object) -> None:
        executor._batch_split_map["batch"] = {"batch/a": "a", "batch/b": "b"}

    monkeypatch.setattr(multiproc_executor, "unpack_diffusion_output_shm", noted_meanwhile)
    executor._result_pump(SimpleNamespace(dequeue=dequeue))
    return executor.wait_output_ready(f"batch/{request}")


@pytest.mark.parametrize(("request_id", "value"), [("a", 0.0), ("b", 1.0)])
def test_an_output_that_comes_while_its_batch_is_noted_is_delivered(
    monkeypatch: pytest.MonkeyPatch, request_id: str, value: float
) -> None:
    found = waiting_for(BatchExecutor, request_id, monkeypatch).result(timeout=0)
    assert found.output.tolist() == [value, value]


def test_vllm_omni_by_itself_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once this fails, `BatchExecutor` is no longer needed."""
    assert not waiting_for(MultiprocDiffusionExecutor, "a", monkeypatch).done()
