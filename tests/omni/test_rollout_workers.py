# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni in Ray's workers: routing, weights, a worker that dies, sleep and wake, tensor parallelism."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from torch import Tensor

from models.config.vllm_omni import VllmOmniConfig
from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.weights.buckets import to_host
from models.weights.canary import Canary, CanaryLimits
from models.weights.digests import digests_of
from models.weights.trainable import WeightSyncError, trainable
from tasks.actors.cluster import ray_cluster
from tasks.actors.messages import Proof
from tasks.actors.rollout_group import PendingBatch, RolloutGroup
from tasks.config.rollout import DiffusionRolloutConfig
from tasks.config.trainer import RayConfig
from tasks.data.embeddings import PromptEmbeddings, write_embeddings
from tasks.data.prompts import Prompt
from tasks.system.processes import runs
from tasks.system.stopwatch import Stopwatch
from tests.support.helpers import TEXT_DIM, model_config
from tests.support.patience import wait_until
from tests.support.processes import pid_of

PROMPTS = [Prompt(f"uid-{i}", f"prompt {i}", None, {}, "here") for i in range(4)]
WINDOW = (0, 1)


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> DiffusionModelConfig:
    return model_config(tiny_model, true_cfg_scale=2.0)


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> PromptEmbeddings:
    def encode(texts: list[str]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len("".join(texts)))
        mask = torch.arange(6) < torch.tensor([3 + i % 4 for i in range(len(texts))])[:, None]
        return {
            "prompt_embeds": torch.randn(len(texts), 6, TEXT_DIM, generator=generator),
            "prompt_embeds_mask": mask,
        }

    folder = tmp_path_factory.mktemp("embeddings") / "out"
    names = {"negative_prompt": " ", "max_sequence_length": 6, "model": "none", "model_digest": "none"}
    write_embeddings(PROMPTS, encode, folder, 8, batch_size=8, **names)
    return PromptEmbeddings.open(folder)


@pytest.fixture(scope="module")
def group(config: DiffusionModelConfig, embeddings: PromptEmbeddings) -> Iterator[RolloutGroup]:
    settings = DiffusionRolloutConfig(
        name="vllm_omni",
        n=2,
        micro_batch_size=4,
        num_actors=2,
        placement="colocated",
        pipeline=config.pipeline,
        algo=config.algo,
    )
    with ray_cluster(RayConfig(num_cpus=2)):
        running = RolloutGroup(config, embeddings, settings, device="cpu", seed=0)
        running.group.call_all("ready")
        yield running


Sampled = tuple[np.ndarray, Tensor, Tensor]
"""Pictures, log-probs and latents."""


def sampled(batches: list[PendingBatch]) -> Sampled:
    """Of all batches."""
    pictures = np.concatenate(ray.get([batch.pictures for batch in batches]))
    paths = ray.get([batch.trajectories for batch in batches])
    return pictures, torch.cat([path.log_probs for path in paths]), torch.cat([path.latents for path in paths])


def expected(group: RolloutGroup, oracle: DiffusersRolloutEngine, iteration: int) -> Sampled:
    """What the in-process engine samples for the same requests."""
    cut = group.batch_keys(PROMPTS, 2, iteration)
    assert [len(keys) for keys in cut] == [4, 4]
    results = [oracle.generate(group._request(keys, WINDOW, None, group.recording)) for keys in cut]
    log_probs, latents = (torch.cat([getattr(path, name) for _, path in results]) for name in ("log_probs", "latents"))
    return np.concatenate([pictures.numpy() for pictures, _ in results]), log_probs, latents


def assert_alike(one: Sampled, other: Sampled, log_probs: float = 1e-5) -> None:
    assert np.abs(one[0].astype(int) - other[0].astype(int)).max() <= 1
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=log_probs)
    torch.testing.assert_close(one[2], other[2], rtol=0, atol=2e-5)


def synced(
    groups: list[RolloutGroup], oracle: DiffusersRolloutEngine, weights: dict[str, Tensor], version: int
) -> None:
    """Give workers and oracle the same weights; the workers' canary is the oracle's."""
    oracle.load_weights(weights)
    canary = Canary(groups[0].prompt_table(["uid-0", "uid-1"]))
    proof = Proof(ray.put(digests_of(weights)), ray.put(oracle.canary_velocity(canary)))
    for group in groups:
        loaded = group.load_weights(ray.put([to_host(weights)]), ray.put(canary), proof, version, CanaryLimits(1e-5))
        assert loaded.agreement.difference < 1e-5


def test_workers_share_the_batches_and_sample_what_one_engine_does(
    group: RolloutGroup, config: DiffusionModelConfig
) -> None:
    oracle = DiffusersRolloutEngine(config)
    assert_alike(sampled(group.submit(PROMPTS, 2, 1, WINDOW)), expected(group, oracle, 1))


def test_weights_arrive_and_a_worker_that_dies_comes_back_with_them(
    group: RolloutGroup, config: DiffusionModelConfig
) -> None:
    """The batches that the dead worker had are sampled again, from the weights of the last sync."""
    oracle = DiffusersRolloutEngine(config)
    changed = {name: p.detach() * 1.05 for name, p in oracle.transformer.named_parameters()}
    synced([group], oracle, changed, 1)
    right = expected(group, oracle, 2)
    assert_alike(sampled(group.submit(PROMPTS, 2, 2, WINDOW)), right)

    batches = group.submit(PROMPTS, 2, 2, WINDOW)
    ray.kill(group.group.actors[0], no_restart=False)
    again = group.submit(PROMPTS, 2, 2, WINDOW)
    assert_alike(sampled(batches), right)
    assert_alike(sampled(again), right)


def test_during_the_update_the_workers_sleep(group: RolloutGroup) -> None:
    clock = Stopwatch()
    before = sampled(group.submit(PROMPTS, 2, 3, WINDOW))
    with group.asleep(clock):
        refused = group.submit(PROMPTS[:1], 2, 3, WINDOW)
        with pytest.raises(Exception, match="the engine is asleep"):
            ray.get(refused[0].pictures)
    after = sampled(group.submit(PROMPTS, 2, 3, WINDOW))
    assert_alike(before, after)
    assert clock.seconds["sleep"] > 0


@pytest.fixture
def pair(group: RolloutGroup, config: DiffusionModelConfig, embeddings: PromptEmbeddings) -> RolloutGroup:
    """One worker of two processes, beside those of one."""
    changes = {"num_actors": 1, "placement": "separate", "max_restarts": 0}
    parallel = {"vllm_omni": VllmOmniConfig(tensor_parallel_size=2)}
    settings = group.settings.model_copy(update=changes | parallel)
    return RolloutGroup(config, embeddings, settings, device="cpu", seed=0)


def test_two_processes_sample_what_one_does_and_die_with_their_worker(
    group: RolloutGroup, pair: RolloutGroup, config: DiffusionModelConfig
) -> None:
    """Full weights, then LoRA on top of others; sleep and wake. The sums of two halves round otherwise."""
    oracle = DiffusersRolloutEngine(config)
    start = {name: parameter.detach().clone() for name, parameter in oracle.transformer.named_parameters()}
    for version, scale in enumerate((1.05, 1.0), start=3):
        synced([group, pair], oracle, {name: weight * scale for name, weight in start.items()}, version)
        one, two = (sampled(workers.submit(PROMPTS, 2, 4, WINDOW)) for workers in (group, pair))
        assert_alike(one, two, log_probs=1e-6)

    (worker,) = pair.group.actors
    low_rank = replace(config, model=config.model.model_copy(update={"lora_rank": 4, "lora_alpha": 8}))
    ray.get(worker.__ray_call__.remote(lambda actor: setattr(actor.engine, "model_config", low_rank)))
    oracle = DiffusersRolloutEngine(low_rank)
    generator = torch.Generator().manual_seed(1)
    shapes = {name: parameter.shape for name, parameter in trainable(oracle.transformer).items()}
    synced([pair], oracle, {name: torch.randn(s, generator=generator) * 0.2 for name, s in shapes.items()}, 5)
    adapted = sampled(pair.submit(PROMPTS, 2, 4, WINDOW))
    assert_alike(adapted, expected(pair, oracle, 4), log_probs=1e-6)
    assert (adapted[2] - two[2]).abs().max() > 0.1

    ray.get([worker.sleep.remote(), worker.wake.remote()])
    assert_alike(sampled(pair.submit(PROMPTS, 2, 4, WINDOW)), adapted)

    process = psutil.Process(pid_of(worker))
    others = process.children(recursive=True)
    # By their size: whether a process can set its title depends on the order of its environment.
    assert sum(other.memory_info().rss > 400e6 for other in others if runs(other)) == 2, others
    process.suspend()  # or it may have answered before it is killed
    busy = pair.submit(PROMPTS, 2, 4, WINDOW)
    process.kill()
    wait_until(lambda: not any(runs(other) for other in others), "the end of the worker's own processes", every=0.1)
    with pytest.raises(ray.exceptions.RayActorError):
        sampled(busy)


def test_a_worker_that_holds_other_weights_is_found_out(group: RolloutGroup, config: DiffusionModelConfig) -> None:
    """The last test here: these workers refuse to sample from now on."""
    oracle = DiffusersRolloutEngine(config)
    weights = {name: parameter.detach() for name, parameter in oracle.transformer.named_parameters()}
    canary = Canary(group.prompt_table(["uid-0"]))
    other = Proof(ray.put(digests_of(weights)), ray.put(oracle.canary_velocity(canary) * 1.1))
    with pytest.raises(WeightSyncError, match=r"policy version 2 .* allowed 0.0001"):
        group.load_weights(ray.put([to_host(weights)]), ray.put(canary), other, 2, CanaryLimits(1e-4))
    with pytest.raises(WeightSyncError, match="policy version 2"):
        ray.get(group.submit(PROMPTS[:1], 2, 3, WINDOW)[0].pictures)
