# SPDX-License-Identifier: Apache-2.0
"""How strongly each step's log-prob pulls at the velocity, and the weights that make the steps alike."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.algorithms import FlowDPPOLoss, FlowGRPOLoss
from models.config.algo import DiffusionRolloutAlgoConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import Trajectories
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.schedulers.gradient_scale import gradient_scales, rectifying_weights
from models.schedulers.kernels import KERNELS
from models.schedulers.windows import window_steps
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tests.support.helpers import actor_config, model_config, rollout_request
from tests.support.plain_trainer import plain_updates

ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5, 0.6, 0.9])
SIGMAS = [1.0, 0.9375, 0.875, 0.75, 0.5, 0.0]


def scheduler_of(sigmas: list[float]) -> FlowMatchSDEDiscreteScheduler:
    """With exactly these levels, the last one 0."""
    scheduler = FlowMatchSDEDiscreteScheduler(num_train_timesteps=1000, shift=1.0)
    scheduler.set_timesteps(sigmas=sigmas[:-1])
    assert scheduler.sigmas.tolist() == pytest.approx(sigmas, abs=1e-6)
    return scheduler


def algo_of(**settings: Any) -> DiffusionRolloutAlgoConfig:
    return DiffusionRolloutAlgoConfig(**settings)


def scale_by_hand(kernel: str, level: float, s: float, after: float, second: float) -> float:
    """From the papers' formulas, in Python floats: of a Gaussian |d mu/d v| / sd, of cps 2 sd |d mu/d v|."""
    d = after - s
    if kernel == "cps":
        sd = after * math.sin(level * math.pi / 2)
        return 2 * sd * abs(-(1 - after) * s + math.sqrt(after**2 - sd**2) * (1 - s))
    g = level if kernel == "dance_sde" else level * math.sqrt(s / (1 - (second if s == 1 else s)))
    return math.sqrt(-d) / g + g * math.sqrt(-d) * (1 - s) / (2 * s)


@pytest.mark.parametrize(("kernel", "level"), [("sde", 0.7), ("sde", 1.2), ("dance_sde", 0.3), ("cps", 0.8)])
def test_scales_are_the_formulas(kernel: str, level: float) -> None:
    found = gradient_scales(scheduler_of(SIGMAS), algo_of(sde_type=kernel, noise_level=level))
    expected = [scale_by_hand(kernel, level, s, after, SIGMAS[1]) for s, after in pairwise(SIGMAS)]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.max() > 1.5 * found[:4].min()
    assert (found[-1] == 0) == (kernel == "cps")


def test_scales_of_flash_grpos_table() -> None:
    """Its code holds 1/c of the first ten of Wan's 20 steps at shift 3, whose SDE has g = s_min + (s_1 - s_min) s."""
    sigmas = [3 * t / (1 + 2 * t) for t in (1 - i / 20 for i in range(20))] + [0.0]
    published = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
    ours = []
    for s, after in list(pairwise(sigmas))[:10]:
        algo = algo_of(sde_type="dance_sde", noise_level=sigmas[1] * s)
        ours.append(1 / gradient_scales(scheduler_of(sigmas), algo)[sigmas.index(s)].item())
        assert scale_by_hand("dance_sde", sigmas[1] * s, s, after, 0) == pytest.approx(1 / ours[-1], rel=1e-4)
    assert ours == pytest.approx(published, rel=3e-3)


def test_weights_are_one_in_the_mean_of_the_range_and_nothing_beside_it() -> None:
    algo = algo_of(sde_window_size=1, sde_window_range=(1, 4))
    weights = rectifying_weights(scheduler_of(SIGMAS), algo)
    inverse = [1 / scale_by_hand("sde", 0.7, SIGMAS[i], SIGMAS[i + 1], SIGMAS[1]) for i in (1, 2, 3)]
    assert weights.tolist() == pytest.approx([0, *(3 * x / sum(inverse) for x in inverse), 0], rel=1e-5)
    assert weights.sum().item() == pytest.approx(3.0)
    with pytest.raises(ValueError, match=r"a step of rollout.algo.sde_window_range \[0, 5\) has no noise"):
        rectifying_weights(scheduler_of(SIGMAS), algo_of(sde_type="cps", sde_window_range=(0, 5)))


@pytest.mark.parametrize("loss", [FlowGRPOLoss, FlowDPPOLoss])
def test_rectified_gradients_of_one_step_groups_are_of_one_scale(loss: Any) -> None:
    """Flash-GRPO's groups, in float64: each prompt trains the one step that it drew, and by w c = 1 / mean(1/c) the
    gradient of the velocity is A z / (dims samples mean(1/c)), whichever step that was."""
    low, high, level, dims = 0, 4, 0.7, 5
    algo = algo_of(sde_window_size=1, sde_window_range=(low, high), sde_window_per="prompt", noise_level=level)
    uids = [f"p{number}" for number in range(12)]
    windows = [window_steps(algo, len(SIGMAS) - 1, 0, 3, prompt_uid=uid) for uid in uids]
    assert windows == [[random.Random(f"window/0/3/{uid}").randint(low, high - 1)] for uid in uids]
    steps = [step for (step,) in windows for _ in range(2)]  # of the two samples of each prompt
    assert set(steps) == {0, 1, 2, 3}

    drawn = np.random.default_rng(4)
    x, v, z = (torch.from_numpy(drawn.normal(size=(len(steps), dims))) for _ in range(3))
    advantages = torch.from_numpy(drawn.normal(size=len(steps)))
    sigma, after = (torch.tensor([[SIGMAS[step + ahead]] for step in steps]).double() for ahead in (0, 1))
    velocity = v.requires_grad_()
    step = KERNELS["sde"].step(x, velocity, sigma, after, torch.full_like(sigma, SIGMAS[1]), level)
    log_prob = KERNELS["sde"].log_prob((step.mean + step.std_dev_t * z).detach(), step)
    given: dict[str, Any] = {"log_prob": log_prob, "old_log_prob": log_prob.detach(), "advantages": advantages}
    if loss is FlowDPPOLoss:
        given |= {"prev_sample_mean": step.mean, "old_prev_sample_mean": step.mean.detach()}
        given |= {"std_dev_t": step.std_dev_t}
    weights = rectifying_weights(scheduler_of(SIGMAS), algo)[steps]
    value, _ = loss.compute_loss(**given, config=actor_config(), rollout_is_weights=weights)
    (gradient,) = torch.autograd.grad(value, velocity)

    inverse = [1 / scale_by_hand("sde", level, SIGMAS[i], SIGMAS[i + 1], SIGMAS[1]) for i in range(low, high)]
    expected = advantages[:, None] * z / (dims * len(steps) * sum(inverse) / len(inverse))
    assert (gradient - expected).abs().max() < 1e-5 * expected.abs().max()  # the weights are fp32


# ---- in the update


def rolled_out(model: Path, window: tuple[int, ...]) -> Trajectories:
    request = rollout_request(lengths=(5, 3, 7), window=window, record_means=True)
    _, paths = DiffusersRolloutEngine(model_config(model)).generate(request)
    assert isinstance(paths, Trajectories)
    return paths


def trainer(model: Path, **settings: Any) -> DiffusersFSDPEngine:
    given = {"clip_grad": 1e6, "clip_ratio": 0.05, "ppo_micro_batch_size_per_gpu": 4} | settings
    engine = DiffusersFSDPEngine(model_config(model), actor_config(**given))
    engine.initialize()
    return engine


def by_hand(model: Path, window: tuple[int, ...]) -> torch.Tensor:
    """[6, W] weights of a window's steps; the tiny schedule is 1, 3/4, 1/2, 1/4, 0, its range all but the last step."""
    level = model_config(model).algo.noise_level
    sigmas = [1.0, 0.75, 0.5, 0.25, 0.0]
    inverse = [1 / scale_by_hand("sde", level, sigmas[i], sigmas[i + 1], 0.75) for i in range(3)]
    return torch.tensor([[3 * inverse[i] / sum(inverse) for i in window]] * 6)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("loss", ["flow_grpo", "flow_dppo"])
def test_rectified_updates_equal_the_plain_trainers(one_block_model: Path, loss: str) -> None:
    """A step's samples weigh as the formula says, times the weights that they have; a NaN still leaves one out."""
    window = (0, 2)
    paths = rolled_out(one_block_model, window)
    given = torch.tensor([[0.5, 1.0], [float("nan"), 0.7], [1.3, 1.0], [1.0, 1.0], [0.2, 1.9], [1.0, 0.0]])
    paths = replace(paths, is_weights=given)
    engine = trainer(one_block_model, loss_mode=loss, temporal_gradient_rectification=True)
    metrics = [engine.update_policy([ActorBatch([(paths, ADVANTAGES)], 5.5)]) for _ in range(2)]
    weighted = replace(paths, is_weights=given * by_hand(one_block_model, window))
    plain = plain_updates(engine.model_config, engine.actor_config, [(weighted, ADVANTAGES)], updates=2)
    assert [m["grad_norm"] for m in metrics] == pytest.approx(plain[1], rel=1e-3)
    for name, tensor in engine.gather_weights().items():
        assert (tensor - plain[0][name]).abs().max() < 2e-6


@pytest.mark.usefixtures("one_rank")
def test_the_first_ratio_is_exactly_one(one_block_model: Path) -> None:
    """On as off: a weight is beside the ratio, not in it."""
    paths = rolled_out(one_block_model, (1,))
    for rectified in (False, True):
        engine = trainer(one_block_model, ppo_micro_batch_size_per_gpu=6, temporal_gradient_rectification=rectified)
        assert (engine.step_weights is not None) == rectified
        assert engine.update_policy([ActorBatch([(paths, ADVANTAGES)], 6)])["ratio_deviation/max"] == 0.0
