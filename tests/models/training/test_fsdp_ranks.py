# SPDX-License-Identifier: Apache-2.0
"""Two trainer ranks are one trainer: the same weights, the same metrics, the same checkpoints."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import RolloutRequest, Trajectories
from models.training.engine import FIRST_RATIO
from models.training.fsdp import ActorBatch, DiffusersFSDPEngine
from models.training.gradients import clip_gradients
from models.weights.trainable import kept_in_fp32, trainable
from tasks.actors.update_plan import over_ranks
from tests.support.helpers import (
    actor_config,
    gloo_world,
    largest_difference,
    model_config,
    noise_keys,
    rollout_request,
    single_rank,
    wait_until_saved,
)
from tests.support.plain_trainer import plain_updates
from tests.support.tiny_models import embeddings_of

NAN = float("nan")
# The second rank has three samples without a reward, two of them a whole micro-batch: it must still take part.
ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5, 0.6, NAN, NAN, NAN])
# Rollout correction: the ranks lose different steps of the five samples, and one of the first rank's drops out whole.
IS_WEIGHTS = torch.tensor(
    [[1.0, 2.0, NAN], [0.5, 1.0, 1.0], [NAN] * 3, [1.0, 0.0, 2.0], [NAN, 1.5, NAN], [1.0] * 3, [1.0] * 3, [NAN] * 3]
)
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora_rank": 4, "lora_alpha": 8},
    "corrected": {},
    "divided": {},
    "in_one_group": {"lora_rank": 4, "lora_alpha": 8},
    "recomputed": {"lora_rank": 4, "lora_alpha": 8},
}
TWO_BLOCKS = ("full", "in_one_group", "recomputed")
"""The kinds whose model has two blocks; those of the others have one, which is quicker."""
RESUMED = ("full", "lora")
"""Kinds whose checkpoints are read, and which are trained on meanwhile; the others would save what "full" does."""
IN_ONE_GROUP = {"shard_frozen": False, "reshard_after_forward": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "corrected": {"loss_mode": "grpo_guard"},
    "divided": {"shard_gradients": True},
    "in_one_group": IN_ONE_GROUP,
    "recomputed": {**IN_ONE_GROUP, "gradient_checkpointing": True},
}


@dataclass
class Trained:
    """What one rank reports; the weights are rank 0's."""

    metrics: list[dict[str, float]]
    weights: list[dict[str, Tensor]]

    def __add__(self, later: "Trained") -> "Trained":
        return Trained(self.metrics + later.metrics, self.weights + later.weights)

    @property
    def grad_norms(self) -> list[float]:
        return [metrics["grad_norm"] for metrics in self.metrics]


class Inputs(NamedTuple):
    """A model and eight samples of it."""

    model: Path
    trajectories: Trajectories


Models = dict[bool, Inputs]
"""Has it two blocks? -> the model."""


def new_engine(models: Models, kind: str) -> DiffusersFSDPEngine:
    config = model_config(models[kind in TWO_BLOCKS].model, **KINDS[kind])
    settings: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.5, "enable": True, "update_interval": 1}
    settings |= SETTINGS.get(kind, {})
    engine = DiffusersFSDPEngine(config, actor_config(ppo_micro_batch_size_per_gpu=2, clip_grad=0.1, **settings))
    engine.initialize()
    return engine


def batch_of(models: Models, kind: str, rank: int, ranks: int) -> ActorBatch:
    """The rank's equal share of the eight samples; five of them count, or nine of these five's fifteen steps."""
    trajectories = models[kind in TWO_BLOCKS].trajectories
    if kind != "corrected":
        return part_of(trajectories, rank, ranks)
    return part_of(replace(trajectories, is_weights=IS_WEIGHTS), rank, ranks, count=9 / 3)


def part_of(trajectories: Trajectories, rank: int, ranks: int, count: float = 5) -> ActorBatch:
    share = torch.arange(8).chunk(ranks)[rank]
    return ActorBatch([(trajectories.rows(share), ADVANTAGES[share])], global_count=count)


def update(engine: DiffusersFSDPEngine, batch: ActorBatch, times: int) -> Trained:
    """Weights after every update."""
    result = Trained([], [])
    for _ in range(times):
        result.metrics.append(engine.update_policy([batch]))
        result.weights.append(engine.gather_weights())
    return result


def averaged(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    with engine.holding("average"):
        return engine.gather_weights()


def train_two_ranks(rank: int, models: Models, wan: tuple[Path, Trajectories], shared: Path) -> dict[str, Any]:
    """Two updates, of some a third one while a checkpoint is written in the background; the average at the end.

    And where one rank's checkpoints lead to.
    """
    folder = shared / "from_two"
    results: dict[str, Any] = {
        "bad_sample": past_a_bad_sample(models[False], rank, ranks=2),
        "first": unlike_steps(models[False], rank),
        "left_out": unlike_steps(models[False], rank, broken=True),
        "wan": kept_in_fp32_steps(*wan, rank, 2, folder / "wan"),
        "resumed": resume_on_two_ranks(rank, models, shared / "from_one"),
    }
    for kind in KINDS:
        engine, batch = new_engine(models, kind), batch_of(models, kind, rank, ranks=2)
        trained = update(engine, batch, times=2)
        if kind in RESUMED:
            engine.start_saving(folder / kind)
            trained += update(engine, batch, times=1)
            wait_until_saved(engine)
        results[kind] = (trained, averaged(engine))
    return results


def resume_on_two_ranks(rank: int, models: Models, folder: Path) -> dict[str, Trained]:
    results = {}
    for kind in RESUMED:
        engine = new_engine(models, kind)
        engine.load_checkpoint(folder / kind)
        results[kind] = update(engine, batch_of(models, kind, rank, ranks=2), times=1)
    return results


@dataclass
class Steps:
    """What one rank reports of an engine's updates; the weights are rank 0's, `whole` is what is not sharded."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    whole: dict[str, Tensor]


def past_a_bad_sample(inputs: Inputs, rank: int, ranks: int) -> Steps:
    """Two optimiser steps, of which the first meets a sample of the first rank that is not finite."""
    settings = actor_config(ppo_micro_batch_size_per_gpu=2, clip_grad=0.1)
    engine = DiffusersFSDPEngine(model_config(inputs.model), settings, max_nonfinite_steps=1)
    engine.initialize()
    broken = inputs.trajectories.rows(torch.arange(8))
    broken.latents[0, 1] = NAN
    batches = [part_of(each, rank, ranks) for each in (broken, inputs.trajectories)]
    return Steps([engine.update_policy(batches)], engine.gather_weights(), {})


UNLIKE = (torch.tensor([1.0, -0.8, 0.3, -1.5, 0.7, NAN, NAN, NAN]), torch.tensor([NAN, NAN, NAN, 0.4, *[0.2] * 4]))
"""Of two optimiser steps, in which the ranks' shares of what counts are not the same."""
SHIFTS = torch.arange(1.0, 9) / 1000
"""By which each of the eight samples' old log-probs are off."""


def unlike_steps(inputs: Inputs, rank: int, broken: bool = False) -> dict[str, float]:
    """Metrics of two optimiser steps of which the first rank has 4 and 1 samples that count, the second 1 and 4; with
    `broken` the first step meets a sample that is not finite, and is left out."""
    settings = actor_config(ppo_micro_batch_size_per_gpu=2)
    engine = DiffusersFSDPEngine(model_config(inputs.model), settings, max_nonfinite_steps=1)
    engine.initialize()
    shifted = replace(inputs.trajectories, log_probs=inputs.trajectories.log_probs + SHIFTS[:, None])
    share = torch.arange(8).chunk(2)[rank]
    steps = [(shifted.rows(share), values[share]) for values in UNLIKE]
    if broken and rank == 0:
        steps[0][0].latents[0, 1] = NAN
    return engine.update_policy([ActorBatch([step], 5) for step in steps])


def kept_in_fp32_steps(model: Path, trajectories: Trajectories, rank: int, ranks: int, folder: Path) -> Steps:
    """Two updates of full weights in bf16, some of which diffusers keeps in fp32; then a checkpoint."""
    engine = wan_engine(model)
    rows = torch.arange(4).chunk(ranks)[rank]
    batch = ActorBatch([(trajectories.rows(rows), ADVANTAGES[rows])], 4)
    metrics = [engine.update_policy([batch]) for _ in range(2)]
    engine.save_checkpoint(folder)
    whole = {name: p.detach() for name, p in trainable(engine.module).items() if not isinstance(p, DTensor)}
    return Steps(metrics, engine.gather_weights(), whole)


def wan_config(model: Path) -> DiffusionModelConfig:
    return model_config(model, height=32, width=64, num_frames=5, dtype="bfloat16")


def wan_engine(model: Path) -> DiffusersFSDPEngine:
    engine = DiffusersFSDPEngine(wan_config(model), actor_config(ppo_micro_batch_size_per_gpu=2, clip_grad=0.1))
    engine.initialize()
    return engine


@pytest.fixture(scope="module")
def wan(tiny_folder: Any) -> tuple[Path, Trajectories]:
    """The checkpoint and four samples of two prompts."""
    config = wan_config(tiny_folder("wan"))
    table, index = embeddings_of(config, (5, 3)), torch.arange(2).repeat_interleave(2)
    _, sampled = DiffusersRolloutEngine(config).generate(RolloutRequest(noise_keys(2, 2), table, index, (0,)))
    assert sampled is not None
    return tiny_folder("wan"), sampled


@pytest.fixture(scope="module")
def models(tiny_model: Path, one_block_model: Path) -> Models:
    """Eight samples of two prompts; LoRA starts as the base model, so all kinds can train on them."""
    return {True: sampled_from(tiny_model), False: sampled_from(one_block_model)}


def sampled_from(model: Path) -> Inputs:
    _, sampled = DiffusersRolloutEngine(model_config(model)).generate(rollout_request(samples=4, record_means=True))
    assert sampled is not None
    return Inputs(model, sampled)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two_ranks(
    models: Models, wan: tuple[Path, Trajectories], shared: Path, one_rank_result: dict
) -> list[dict[str, Any]]:
    """One world for all that ranks do here, so after `one_rank_result`, whose checkpoints it reads."""
    return gloo_world(train_two_ranks, 2, shared / "world", models, wan, shared)


@pytest.fixture(scope="module")
def one_rank_result(models: Models, shared: Path) -> dict[str, tuple]:
    results: dict[str, tuple] = {}
    with single_rank():
        for kind in KINDS:
            engine, batch = new_engine(models, kind), batch_of(models, kind, 0, ranks=1)
            trained = update(engine, batch, times=2)
            if kind in RESUMED:
                engine.save_checkpoint(shared / "from_one" / kind)
                trained += update(engine, batch, times=1)
            results[kind] = (trained, averaged(engine))
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one(two_ranks: list[dict], one_rank_result: dict, kind: str) -> None:
    """Weights after each update and the average at the end; only the order of sums differs."""
    (two, two_average), (one, one_average) = two_ranks[0][kind], one_rank_result[kind]
    for ours, theirs in zip(two.weights, one.weights, strict=True):
        assert largest_difference(ours, theirs) < 1e-5
    assert largest_difference(two_average, one_average) < 1e-5
    assert largest_difference(one.weights[0], one.weights[-1]) > 1e-3
    assert two_ranks[1][kind][0].weights == [{}] * len(one.weights)


def test_blocks_that_are_computed_anew_change_nothing(two_ranks: list[dict], one_rank_result: dict) -> None:
    """To the bit, weights and metrics of each update."""
    for results in (one_rank_result, *two_ranks):
        kept, anew = results["in_one_group"][0], results["recomputed"][0]
        assert anew.metrics == kept.metrics
        for ours, theirs in zip(anew.weights, kept.weights, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_report_the_metrics_of_one(two_ranks: list[dict], one_rank_result: dict, kind: str) -> None:
    """The first rank has more samples that count than the second, so it weighs more in all means."""
    of_ranks, one = [rank[kind][0].metrics for rank in two_ranks], one_rank_result[kind][0].metrics
    for alone, *parts in zip(one, *of_ranks, strict=True):
        assert parts[0]["sample_steps"] + parts[1]["sample_steps"] == alone["sample_steps"]
        assert parts[0]["sample_steps"] > parts[1]["sample_steps"]
        joined = over_ranks(parts)
        assert {"pg_loss", "kl_loss", "logprob_abs_diff/mean", FIRST_RATIO} <= joined.keys() == alone.keys()
        of_samples = joined.keys() - {"sample_steps", "first_sample_steps", "recorded_steps"}
        found, expected = ({name: metrics[name] for name in of_samples} for metrics in (joined, alone))
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_what_is_of_the_first_step_is_weighed_by_the_first_steps_samples(two_ranks: list[dict]) -> None:
    """Over both steps the ranks have trained on as many samples."""
    of_ranks = [rank["first"] for rank in two_ranks]
    assert of_ranks[0]["sample_steps"] == of_ranks[1]["sample_steps"]
    joined, off = over_ranks(of_ranks), SHIFTS[~UNLIKE[0].isnan()]
    assert joined["logprob_abs_diff/mean"] == pytest.approx(off.mean().item(), rel=1e-3)
    assert joined[FIRST_RATIO] == pytest.approx((1 - (-off).exp()).mean().item(), rel=1e-3)


def test_a_step_that_is_left_out_weighs_in_no_mean_over_ranks(two_ranks: list[dict]) -> None:
    """It moved nothing, so the step that is left has the weights that sampled: its ratios are the shifts'."""
    of_ranks = [rank["left_out"] for rank in two_ranks]
    assert [of_rank["nonfinite_steps"] for of_rank in of_ranks] == [1, 1]
    joined, off = over_ranks(of_ranks), SHIFTS[~UNLIKE[1].isnan()]
    assert joined["ratio_deviation/mean"] == pytest.approx((1 - (-off).exp()).mean().item(), rel=1e-3)
    # Both steps were computed, three timesteps a sample; a rank's mean is half of what the two have.
    assert (joined["sample_steps"], joined["nonfinite_sample_steps"]) == (3 * 10 / 2, 3 * 5 / 2)


def test_the_mean_is_over_the_steps_that_count(two_ranks: list[dict], models: Models) -> None:
    """The gradient of two ranks is that of a plain trainer, which knows neither ranks nor counts."""
    model, trajectories = models[False]
    kept = ~ADVANTAGES.isnan()
    weighted = replace(trajectories, is_weights=IS_WEIGHTS).rows(torch.nonzero(kept).flatten())
    settings = actor_config(loss_mode="grpo_guard", clip_grad=0.1)
    _, norms = plain_updates(model_config(model), settings, [(weighted, ADVANTAGES[kept])], updates=1)
    assert two_ranks[0]["corrected"][0].grad_norms[0] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_norm_is_the_whole_worlds_on_every_rank(
    two_ranks: list[dict], one_rank_result: dict, kind: str
) -> None:
    first, second = (rank[kind][0].grad_norms for rank in two_ranks)
    assert first == second
    assert first == pytest.approx(one_rank_result[kind][0].grad_norms, rel=1e-4)


@pytest.mark.parametrize("kind", RESUMED)
def test_a_checkpoint_of_two_ranks_goes_on_with_one(
    two_ranks: list[dict], models: Models, shared: Path, kind: str
) -> None:
    expected, expected_average = two_ranks[0][kind]
    with single_rank():
        engine = new_engine(models, kind)
        engine.load_checkpoint(shared / "from_two" / kind)
        assert largest_difference(engine.gather_weights(), expected.weights[1]) == 0.0
        resumed = update(engine, batch_of(models, kind, 0, ranks=1), times=1)
        assert largest_difference(resumed.weights[0], expected.weights[2]) < 1e-5
        assert largest_difference(averaged(engine), expected_average) < 1e-5


def test_a_checkpoint_of_one_rank_goes_on_with_two(two_ranks: list[dict], one_rank_result: dict) -> None:
    for kind in RESUMED:
        resumed = two_ranks[0]["resumed"][kind].weights[0]
        assert largest_difference(resumed, one_rank_result[kind][0].weights[2]) < 1e-5


def test_all_ranks_leave_out_a_step_that_one_ranks_sample_spoils(two_ranks: list[dict], models: Models) -> None:
    """And are then where they were: the next step is the first."""
    with single_rank():
        one = past_a_bad_sample(models[False], 0, 1)
        engine = DiffusersFSDPEngine(
            model_config(models[False].model), actor_config(ppo_micro_batch_size_per_gpu=2, clip_grad=0.1)
        )
        engine.initialize()
        start = engine.gather_weights()
        spared = engine.update_policy([part_of(models[False].trajectories, 0, 1)])
        weights = engine.gather_weights()
    for run in (one, *(rank["bad_sample"] for rank in two_ranks)):
        assert (run.metrics[0]["nonfinite_steps"], run.metrics[0]["optimizer_steps"]) == (1, 1)
        assert run.metrics[0]["grad_norm"] == pytest.approx(spared["grad_norm"], rel=1e-4)
    assert largest_difference(one.weights, weights) == 0.0
    assert largest_difference(two_ranks[0]["bad_sample"].weights, weights) < 1e-5
    assert largest_difference(weights, start) > 1e-3


def test_weights_that_stay_in_fp32_are_one_on_all_ranks(
    two_ranks: list[dict], wan: tuple[Path, Trajectories], shared: Path
) -> None:
    """They are whole on each: their gradient is averaged, and its norm is in the whole gradient's."""
    first, second = (rank["wan"] for rank in two_ranks)
    with single_rank():
        one = kept_in_fp32_steps(*wan, 0, 1, shared / "from_one" / "wan")
        engine = wan_engine(wan[0])
        engine.load_checkpoint(shared / "from_two" / "wan")
        assert largest_difference(engine.gather_weights(), first.weights) == 0.0
    assert first.whole.keys() == kept_in_fp32(DiffusersRolloutEngine(wan_config(wan[0])).transformer)
    assert largest_difference(first.whole, second.whole) == 0.0
    for two in (first, second):  # bf16 rounds the parts of a batch as it does not round the whole
        norms = [[step["grad_norm"] for step in run.metrics] for run in (two, one)]
        assert norms[0] == pytest.approx(norms[1], rel=0.02)
    kept = {name: one.weights[name] for name in first.whole}
    assert largest_difference(first.whole, kept) < 2e-4
    assert max(one.metrics[step]["grad_norm"] for step in range(2)) > 0


def test_one_norm_clips_sharded_and_whole_gradients() -> None:
    with single_rank():
        mesh = init_device_mesh("cpu", (1,))

        def sharded(*values: float) -> Tensor:
            return distribute_tensor(torch.tensor(values), mesh, [Shard(0)])

        one, other, idle = (
            nn.Parameter(sharded(0.0, 0.0, 0.0)),
            nn.Parameter(torch.zeros(2)),
            nn.Parameter(torch.ones(1)),
        )
        one.grad, other.grad = sharded(0.0, 3.0, 0.0), torch.tensor([0.0, 4.0])
        assert clip_gradients([one, other, idle], 10.0).item() == 5.0
        assert other.grad.tolist() == [0.0, 4.0]
        assert clip_gradients([one, other, idle], 1.0).item() == 5.0
        assert one.grad.full_tensor().tolist() == pytest.approx([0.0, 0.6, 0.0])
        assert other.grad.tolist() == pytest.approx([0.0, 0.8])
        assert clip_gradients([idle], 1.0).item() == 0.0
