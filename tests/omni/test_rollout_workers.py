"""vLLM-Omni in Ray's workers: routing, weights, a worker that dies, sleep and wake."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from helpers import TEXT_DIM, model_config
from torch import Tensor

from models.base import DiffusionModelConfig
from models.engines.canary import Canary
from models.engines.diffusers_rollout import DiffusersRolloutEngine
from models.engines.weights import WeightSyncError
from tasks.clock import Stopwatch
from tasks.cluster import ray_cluster
from tasks.config import DiffusionRolloutConfig, RayConfig
from tasks.dataset import Prompt, PromptEmbeddings, write_embeddings
from tasks.rollout import PendingBatch, RolloutGroup

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
        running = RolloutGroup(config, embeddings, settings, device="cpu", seed=0, record_means=False)
        running.group.call_all("ready")
        yield running


def sampled(batches: list[PendingBatch]) -> tuple[np.ndarray, Tensor]:
    """Pictures and log-probs of all batches."""
    pictures = np.concatenate(ray.get([batch.pictures for batch in batches]))
    return pictures, torch.cat([path.log_probs for path in ray.get([batch.trajectories for batch in batches])])


def expected(group: RolloutGroup, oracle: DiffusersRolloutEngine, iteration: int) -> tuple[np.ndarray, Tensor]:
    """What the in-process engine samples for the same requests."""
    samples = [(prompt, i) for prompt in PROMPTS for i in range(2)]
    parts = [group._request(samples[i : i + 4], 0, iteration, WINDOW, None, group.outputs) for i in (0, 4)]
    results = [oracle.generate(part) for part in parts]
    log_probs = [trajectories.log_probs for _, trajectories in results if trajectories]
    return np.concatenate([pictures.numpy() for pictures, _ in results]), torch.cat(log_probs)


def assert_alike(one: tuple[np.ndarray, Tensor], other: tuple[np.ndarray, Tensor]) -> None:
    assert np.abs(one[0].astype(int) - other[0].astype(int)).max() <= 1
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-5)


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
    oracle.load_weights(changed)
    canary = Canary(group.prompt_table(["uid-0", "uid-1"]))
    velocity = oracle.canary_velocity(canary)
    assert group.load_weights(ray.put(changed), canary, ray.put(velocity), 1, 1e-4) < 1e-4
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
    assert np.array_equal(before[0], after[0])
    assert clock.seconds["sleep"] > 0


def test_a_worker_that_holds_other_weights_is_found_out(group: RolloutGroup, config: DiffusionModelConfig) -> None:
    """The last test here: these workers refuse to sample from now on."""
    oracle = DiffusersRolloutEngine(config)
    weights = {name: parameter.detach() for name, parameter in oracle.transformer.named_parameters()}
    canary = Canary(group.prompt_table(["uid-0"]))
    other = ray.put(oracle.canary_velocity(canary) * 1.1)
    with pytest.raises(WeightSyncError, match=r"policy version 2 .* allowed 0.0001"):
        group.load_weights(ray.put(weights), canary, other, 2, 1e-4)
    with pytest.raises(WeightSyncError, match="policy version 2"):
        ray.get(group.submit(PROMPTS[:1], 2, 3, WINDOW)[0].pictures)
