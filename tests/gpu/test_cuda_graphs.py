# SPDX-License-Identifier: Apache-2.0
"""The rollout's CUDA graphs compute what the model computes, through updates, syncs, other batches and sleep.

Skipped without CUDA. On a GPU machine: `python -m pytest tests/gpu/test_cuda_graphs.py`, a few seconds, eager.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.words_iteration import GRAPHS, PLAIN, SMALL, Bench, build_model, measure, recipe
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import FinishedLatents, RolloutRequest
from models.words_stable_diffusion_3.settings import smallest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Trainer and both rollouts of the smallest words model."""
    folder = tmp_path_factory.mktemp("words") / "model"
    build_model(folder, smallest())
    config = recipe().with_changes(SMALL)
    config = config.with_changes({"actor_rollout_ref": {"model": {"path": str(folder)}}})
    device = torch.device("cuda:0")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield Bench(config, "cuda")
    dist.destroy_process_group()


def latents_of(engine: DiffusersRolloutEngine, request: RolloutRequest) -> torch.Tensor:
    """Finished ones."""
    recorded = engine.produce(request).recorded
    assert isinstance(recorded, FinishedLatents)
    return recorded.latents


def test_samples_log_probs_and_canary_are_equal_to_the_bit(bench: Bench) -> None:
    """Before and after an update and the sync that follows it; the graph is recorded once."""
    measure(bench, repeats=2)
    graphs = bench.rollouts[GRAPHS].graphs
    assert graphs is not None
    assert len(graphs) == 1  # the canary has the batch's shape


def test_a_smaller_batch_and_a_sleep_make_new_graphs(bench: Bench) -> None:
    engine, plain = bench.rollouts[GRAPHS], bench.rollouts[PLAIN]
    graphs, request = engine.graphs, bench.requests(7)[0]
    assert graphs is not None
    first = torch.tensor([0, 1])
    small = replace(request, keys=request.keys[:2], prompt_index=request.prompt_index[first])
    for one in (request, small, request):
        assert torch.equal(latents_of(engine, one), latents_of(plain, one))
    assert len(graphs) == 2
    engine.sleep()
    assert len(graphs) == 0
    engine.wake()
    for one in (request, small, request):
        assert torch.equal(latents_of(engine, one), latents_of(plain, one))
    assert len(graphs) == 2
