# SPDX-License-Identifier: Apache-2.0
"""Workers with a GPU are forks of a process that has imported what they do, and has left CUDA alone.

Skipped without CUDA. On a GPU machine: `python -m pytest tests/gpu/test_worker_forks_on_cuda.py -s`.
"""

import sys
import time
from typing import Any

import pytest
import ray
import torch

from models.runtime.compiled import SAME_EVERYWHERE
from tasks.actors.actor_group import ActorGroup
from tasks.actors.cluster import ray_cluster
from tasks.actors.worker_forks import VARIABLE
from tasks.config.trainer import RayConfig

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import it
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")


class Computes:
    """An actor that tells whether its modules were there, and computes on the GPU, compiled code too."""

    def began(self) -> dict[str, Any]:
        had = {"torch", "diffusers", "peft"} <= set(sys.modules)
        import diffusers  # noqa: F401  here: did somebody import it before?
        import torch

        torch.manual_seed(7)
        layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).cuda()
        compiled = torch.compile(layer, options=SAME_EVERYWHERE)  # by default two processes may choose other kernels
        loss = compiled(torch.randn(32, 64, device="cuda")).std()
        bits = [value.cpu().numpy().tobytes() for value in torch.autograd.grad(loss, [*layer.parameters()])]
        return {"had": had, "devices": torch.cuda.device_count(), "bits": bits}


def answers(uses_forks: bool) -> list[dict[str, Any]]:
    """What two workers that share a GPU say."""
    begun = time.perf_counter()
    with ray_cluster(RayConfig(num_cpus=2, forked_workers=uses_forks), uses_gpus=True):
        said = ActorGroup(Computes, 2, 0.5).call_all("began")
    print(f"forks {uses_forks}: {time.perf_counter() - begun:.1f} s until two workers had computed")
    return said


def test_they_compute_what_python_would(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The same bits, and no word of a worker that is no fork."""
    monkeypatch.delenv(VARIABLE, raising=False)
    forked, plain = answers(True), answers(False)
    assert [each["had"] for each in (*forked, *plain)] == [True, True, False, False]
    assert not [record for record in caplog.records if "starts some seconds later" in record.getMessage()]
    assert [each["devices"] for each in forked] == [1, 1]
    assert all(each["bits"] == plain[0]["bits"] for each in (*forked, *plain))
