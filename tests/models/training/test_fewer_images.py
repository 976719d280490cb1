# SPDX-License-Identifier: Apache-2.0
"""V-GRPO's draws (arXiv 2604.23380), each setting alone and both together, against its formulas in NumPy's float64."""

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch

from models.algorithms import AdvantageWeightedMatchingLoss, DiffusionNFTLoss
from models.config.actor import DiffusionActorConfig, DiffusionLossConfig, ForwardProcessConfig
from models.samples.trajectories import FinishedLatents
from models.schedulers.noise_keys import NoiseKey
from models.training.noised import NoisedLatents, add_noise, noise_latents
from tests.support.helpers import prompt_table

SCHEDULE = torch.tensor([1.0, 0.96875, 0.9375, 0.875, 0.75, 0.5, 0.25, 0.0])
LEVELS = SCHEDULE[:-1].tolist()
COUNT = 3
PARTS = (LEVELS[:3], LEVELS[3:5], LEVELS[5:7])
"""Seven levels in three parts, the longer one first."""
SIZE = 6
OWN, OLD = np.random.default_rng(1).normal(size=(2, SIZE, SIZE)) / 3
"""The model: a velocity v = M x_t, of the policy and of the one that sampled."""
DRAWS: dict[str, dict[str, Any]] = {
    "neither": {},
    "noise shared": {"share_noise_in_group": True},
    "levels stratified": {"timestep_sampling": "stratified"},
    "both": {"share_noise_in_group": True, "timestep_sampling": "stratified"},
}
each_draw = pytest.mark.parametrize("name", DRAWS)


def samples_of(prompts: int, each: int) -> FinishedLatents:
    """In float64; the samples of a prompt lie apart."""
    keys = tuple(NoiseKey(0, 1, f"p{p}", i) for i in range(each) for p in range(prompts))
    random = np.random.default_rng(2)
    return FinishedLatents(
        keys=keys,
        prompts=prompt_table([3] * prompts),
        prompt_index=torch.arange(prompts).repeat(each),
        latents=torch.from_numpy(random.normal(size=(len(keys), SIZE))),
        advantages=torch.from_numpy(random.normal(size=len(keys))),
    )


def noised(samples: FinishedLatents, name: str) -> NoisedLatents:
    return noise_latents(samples, SCHEDULE, ForwardProcessConfig(num_train_timesteps=COUNT, **DRAWS[name]), False)


def generator(prompt: str, sample: int, draw: int) -> torch.Generator:
    """Of the documented name of a draw of seed 0 and iteration 1."""
    digest = hashlib.sha256(f"0/1/{prompt}/{sample}/{draw}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def drawn_by_hand(samples: FinishedLatents, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(t [B, K], e [B, K, D]): levels are draw -2, the noise of the k-th of them is draw -3 - k; a group's own sample
    is number -1."""
    levels, noise = [], []
    for key in samples.keys:
        sample = -1 if "share_noise_in_group" in DRAWS[name] else key.sample_index
        drawn = generator(key.prompt_uid, sample, -2)
        if "timestep_sampling" in DRAWS[name]:
            levels.append([part[int(torch.randint(len(part), (1,), generator=drawn))] for part in PARTS])
        else:
            levels.append([LEVELS[place] for place in torch.randperm(len(LEVELS), generator=drawn)[:COUNT]])
        each = [torch.randn(SIZE, generator=generator(key.prompt_uid, sample, -3 - k)) for k in range(COUNT)]
        noise.append([row.tolist() for row in each])
    return np.array(levels), np.array(noise)


# ---- the draws


@each_draw
def test_levels_and_noise_are_the_documented_draws(name: str) -> None:
    samples = samples_of(5, 4)
    levels, noise = drawn_by_hand(samples, name)
    found = noised(samples, name)
    assert np.array_equal(found.sigmas.numpy(), levels)
    assert np.array_equal(found.noise.numpy(), noise)


@each_draw
def test_what_the_samples_of_a_prompt_share_is_drawn_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator for each draw of levels and of noise: of 5 prompts, or of all their 20 samples."""
    begun, seed_of = [], NoiseKey.seed_of
    monkeypatch.setattr(NoiseKey, "seed_of", lambda key, step: begun.append(key) or seed_of(key, step))
    noised(samples_of(5, 4), name)
    shared = "share_noise_in_group" in DRAWS[name]
    assert len(begun) == (5 if shared else 20) * (1 + COUNT)


def test_shared_noise_leaves_the_difference_of_two_samples_to_the_samples() -> None:
    """x_t - x_t' = (1-t) (x0 - x0') in a group; of two own draws the variance t^2 + t'^2 comes on top."""
    samples = samples_of(40, 2)
    for name in ("noise shared", "both"):
        found = noised(samples, name)
        for k in range(COUNT):
            t = found.sigmas[:, k].double()
            x_t = add_noise(samples.latents, found.noise[:, k].double(), t)
            between = (1 - t[:40, None]) * (samples.latents[:40] - samples.latents[40:])
            assert torch.allclose(x_t[:40] - x_t[40:], between, rtol=0, atol=1e-14)
    own = noised(samples, "levels stratified")
    t, e = own.sigmas[..., None].double(), own.noise.double()
    apart = (t * e)[:40] - (t * e)[40:]
    expected = (t[:40] ** 2 + t[40:] ** 2).mean().item()
    assert (apart**2).mean().item() == pytest.approx(expected, rel=5 * math.sqrt(2 / apart.numel()))


def test_the_mean_of_stratified_levels_varies_by_what_is_left_within_the_parts() -> None:
    """Closed form: mean of the parts' means, variance sum_k var_k / K^2; without the setting S^2 / K (1 - K/N)."""
    samples = samples_of(4000, 1)
    stratified = np.mean([np.mean(part) for part in PARTS]), sum(np.var(part) for part in PARTS) / COUNT**2
    plain = np.mean(LEVELS), np.var(LEVELS, ddof=1) / COUNT * (1 - COUNT / len(LEVELS))
    assert stratified[1] < 0.2 * plain[1]
    for name, (mean, variance) in {"levels stratified": stratified, "neither": plain}.items():
        means = noised(samples, name).sigmas.double().numpy().mean(1)
        assert abs(means.mean() - mean) < 5 * math.sqrt(variance / 4000)
        assert means.var() == pytest.approx(variance, rel=5 * math.sqrt(2 / 4000))


# ---- what is learnt at them


def errors(weights: np.ndarray, x0: np.ndarray, x_t: np.ndarray, t: float) -> tuple[float, np.ndarray]:
    """The self-normalised error of the x0 that M x_t predicts, and its slope in v with the normaliser held."""
    off = x_t - t * (weights @ x_t) - x0
    normaliser = np.abs(off).mean()
    return (off**2).mean() / normaliser, -2 * t * off / (SIZE * normaliser)


def awm_by_hand(x0: np.ndarray, x_t: np.ndarray, t: float, advantage: float) -> tuple[float, np.ndarray]:
    """(loss, slope in v) of one sample at one level: -A/c ratio, within the clip's range [0.9, 1.1] of the ratio."""
    (own, slope), (old, _) = (errors(weights, x0, x_t, t) for weights in (OWN, OLD))
    ratio, a = math.exp(old - own), advantage / 5
    held = a * min(max(ratio, 0.9), 1.1) < a * ratio
    return (-a * min(max(ratio, 0.9), 1.1), 0 * slope) if held else (-a * ratio, a * ratio * slope)


def nft_by_hand(x0: np.ndarray, x_t: np.ndarray, t: float, advantage: float) -> tuple[float, np.ndarray]:
    """(loss, slope in v) of one sample at one level, with b = 0.4: c (r e+ + (1-r) e-) / b."""
    b, c, share = 0.4, 5.0, advantage / 10 + 0.5
    towards, slope = errors(b * OWN + (1 - b) * OLD, x0, x_t, t)
    away, against = errors((1 + b) * OLD - b * OWN, x0, x_t, t)
    return c * (share * towards + (1 - share) * away) / b, c * (share * slope - (1 - share) * against)


LOSSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "awm": (
        AdvantageWeightedMatchingLoss,
        awm_by_hand,
        {"awm_weighting": "adaptive", "clip_ratio": 0.1, "awm_ema_coef": 0.0},
    ),
    "diffusion_nft": (DiffusionNFTLoss, nft_by_hand, {"nft_beta": 0.4}),
}


@pytest.mark.parametrize("loss", LOSSES)
@each_draw
def test_loss_and_gradient_are_the_formulas(name: str, loss: str) -> None:
    """Of a linear model, over all samples and levels; advantages are inside the clamp at c = 5."""
    samples = samples_of(5, 4)
    kind, by_hand, settings = LOSSES[loss]
    levels, noise = drawn_by_hand(samples, name)
    expected, gradient, held = 0.0, np.zeros((SIZE, SIZE)), 0
    assert samples.advantages is not None
    for x0, e, t, advantage in zip(samples.latents.numpy(), noise, levels, samples.advantages.tolist(), strict=True):
        for k in range(COUNT):
            x_t = (1 - t[k]) * x0 + t[k] * e[k]
            value, slope = by_hand(x0, x_t, t[k], advantage)
            expected += value / levels.size
            gradient += np.outer(slope, x_t) / levels.size
            held += not slope.any()
    assert (held > 0) == (loss == "awm")

    weights = torch.from_numpy(OWN).requires_grad_()
    config = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(adv_clip_max=5.0, **settings))
    drawn = noised(samples, name)
    losses = [at_level(drawn.step(k), weights, kind, config) for k in range(COUNT)]
    total = torch.stack(losses).mean()
    total.backward()
    assert weights.grad is not None
    tolerance = 1e-6 if loss == "awm" else 1e-12  # AWM hands its loss on in fp32, DiffusionNFT is float64 throughout
    assert total.item() == pytest.approx(expected, rel=tolerance)
    assert np.abs(weights.grad.numpy() - gradient).max() < tolerance * np.abs(gradient).max()


def at_level(one: NoisedLatents, weights: torch.Tensor, kind: Any, config: DiffusionActorConfig) -> torch.Tensor:
    """The loss of all samples at their one level."""
    noise, t = one.noise[:, 0].double(), one.sigmas[:, 0].double()
    x_t = add_noise(one.latents, noise, t)
    velocity = x_t @ weights.T
    given = {"clean_latents": one.latents, "noise": noise, "noisy_latents": x_t, "sigmas": t}
    given |= {"velocity": velocity, "old_velocity": x_t @ torch.from_numpy(OLD).T, "ema_velocity": velocity.detach()}
    given |= {"advantages": one.advantages}
    asked = (*kind.required_model_output_keys, *kind.required_data_keys)
    return kind.compute_loss(**{key: given[key] for key in asked}, config=config)[0]
