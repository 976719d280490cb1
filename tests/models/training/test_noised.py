# SPDX-License-Identifier: Apache-2.0
"""Which finished samples are trained on, and how they are noised again."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from models.algorithms import DPOLoss, get_diffusion_loss_fn
from models.config.actor import ForwardProcessConfig
from models.samples.trajectories import FinishedLatents, PromptTable
from models.schedulers.noise_keys import NoiseKey
from models.training.noised import NoisedLatents, add_noise, noise_latents
from tests.support.helpers import prompt_table

SCHEDULE = torch.tensor([1.0, 0.9375, 0.875, 0.75, 0.5, 0.0])
SHAPE = (4, 3)


def samples_of(prompts: int, each: int, iteration: int = 1) -> FinishedLatents:
    keys = tuple(NoiseKey(0, iteration, f"prompt-{p}", i) for p in range(prompts) for i in range(each))
    generator = torch.Generator().manual_seed(2)
    count = len(keys)
    return FinishedLatents(
        keys=keys,
        prompts=prompt_table([3] * prompts),
        prompt_index=torch.arange(prompts).repeat_interleave(each),
        latents=torch.randn(count, *SHAPE, generator=generator),
        advantages=torch.linspace(-1, 1, count),
    )


def noise(samples: FinishedLatents, paired: bool = False, **settings: Any) -> NoisedLatents:
    return noise_latents(samples, SCHEDULE, ForwardProcessConfig(**settings), paired)


LOGIT_NORMAL = {"timestep_sampling": "logit_normal", "num_train_timesteps": 2}


@pytest.mark.parametrize("settings", [{"num_train_timesteps": 3}, LOGIT_NORMAL])
def test_a_samples_noise_does_not_depend_on_its_neighbours(settings: dict[str, Any]) -> None:
    """Nor on the order: any rank, micro-batch or resume draws the same."""
    samples = samples_of(3, 2)
    whole = noise(samples, **settings)
    order = torch.tensor([4, 1, 5, 0])
    part = noise(samples.rows(order), **settings)
    for name in ("latents", "advantages", "noise", "sigmas"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[order])
    assert part.keys == tuple(samples.keys[i] for i in order)


@pytest.mark.parametrize("settings", [{"num_train_timesteps": 3}, LOGIT_NORMAL])
def test_every_sample_level_and_iteration_has_its_own_noise(settings: dict[str, Any]) -> None:
    first, second = noise(samples_of(3, 2, 1), **settings), noise(samples_of(3, 2, 2), **settings)
    drawn = torch.cat([first.noise.flatten(0, 1), second.noise.flatten(0, 1)])
    assert len(drawn.unique(dim=0)) == len(drawn) == 6 * 2 * first.steps
    assert not torch.equal(first.sigmas, second.sigmas)


@pytest.mark.parametrize("settings", [{"num_train_timesteps": 3}, LOGIT_NORMAL])
def test_a_pair_shares_its_noise_and_levels_and_nothing_else(settings: dict[str, Any]) -> None:
    samples = samples_of(2, 4)
    pairs = noise(samples, paired=True, **settings)
    for name in ("noise", "sigmas"):
        tensor = getattr(pairs, name)
        assert torch.equal(tensor[0::2], tensor[1::2])
        assert len(tensor[0::2].unique(dim=0)) > 2
    assert torch.equal(pairs.latents, samples.latents)
    assert torch.equal(pairs.noise[0::2], noise(samples, **settings).noise[0::2])  # the better one's
    # So does a pair in any other place of a batch.
    again = noise(samples.rows(torch.tensor([6, 7, 0, 1])), paired=True, **settings)
    assert torch.equal(again.noise, pairs.noise[[6, 7, 0, 1]])


def test_levels_of_the_schedule_are_drawn_without_repetition() -> None:
    """All of them in an order of each sample's own; or so many, each equally often."""
    every = noise(samples_of(40, 1)).sigmas
    assert torch.equal(every.sort(1, descending=True).values, SCHEDULE[:-1].expand(40, -1))
    assert len(every.unique(dim=0)) > 20
    some = noise(samples_of(2000, 1), num_train_timesteps=2).sigmas
    assert (some[:, 0] != some[:, 1]).all()
    counts = torch.tensor([(some == level).sum().item() for level in SCHEDULE[:-1]])
    assert counts.sum() == 4000
    assert (counts - 800).abs().max() < 5 * math.sqrt(4000 * 0.2 * 0.8)


@pytest.mark.parametrize(("fraction", "left"), [(1.0, 5), (0.6, 3), (0.79, 3), (0.01, 1)])
def test_timestep_fraction_cuts_the_clean_end(fraction: float, left: int) -> None:
    sigmas = noise(samples_of(3, 1), timestep_fraction=fraction).sigmas
    assert torch.equal(sigmas.sort(1, descending=True).values, SCHEDULE[:left].expand(3, -1))


def test_logit_normal_levels() -> None:
    """The logit is N(0, 1): mean, deviation and the share below -1, each within five standard errors."""
    count = 4000
    logits = noise(samples_of(count // 2, 1), **LOGIT_NORMAL).sigmas.flatten().double().logit()
    assert abs(logits.mean().item()) < 5 / math.sqrt(count)
    assert abs(logits.std().item() - 1) < 5 / math.sqrt(2 * count)
    assert abs((logits < -1).double().mean().item() - 0.158655) < 5 * math.sqrt(0.1587 * 0.8413 / count)
    assert noise(samples_of(2, 1), timestep_sampling="logit_normal").steps == 1


def test_logit_normal_levels_of_a_shifted_schedule() -> None:
    """Against the table of diffusers' own scheduler, from which public DPO takes the level at a share of its length."""
    plain = noise(samples_of(200, 1), **LOGIT_NORMAL).sigmas
    shifted = noise(samples_of(200, 1), logit_normal_shift=3.0, **LOGIT_NORMAL).sigmas
    table = FlowMatchEulerDiscreteScheduler(shift=3.0).timesteps / 1000
    assert (table[((1 - plain) * 1000).long()] - shifted).abs().max() < 0.004  # the table's steps


def test_the_forward_process() -> None:
    """x_t = (1-t) x0 + t e, of whose ends one is clean and the other noise."""
    clean, e = torch.randn(2, 3, *SHAPE, dtype=torch.float64)
    t = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    noisy = add_noise(clean, e, t)
    assert torch.equal(noisy[0], clean[0])
    assert torch.allclose(noisy[1], 0.7 * clean[1] + 0.3 * e[1])
    assert torch.equal(noisy[2], e[2])


def test_one_level_is_a_view_of_all() -> None:
    whole = replace(noise(samples_of(2, 2)), old_velocity=torch.arange(20.0).view(4, 5, 1, 1).expand(-1, -1, *SHAPE))
    one = whole.step(3)
    assert one.steps == 1
    assert torch.equal(one.noise[:, 0], whole.noise[:, 3])
    assert torch.equal(one.sigmas[:, 0], whole.sigmas[:, 3])
    assert one.old_velocity is not None
    assert one.old_velocity[:, 0, 0, 0].tolist() == [3, 8, 13, 18]
    assert torch.equal(one.latents, whole.latents)


# ---- which samples


def chosen(loss: Any, advantages: Tensor, samples: FinishedLatents) -> tuple[list[tuple[str, int]], list[float]]:
    batch = loss.prepare_actor_batch(samples, advantages, None)
    assert torch.equal(batch.prompt_index, torch.tensor([int(key.prompt_uid[-1]) for key in batch.keys]))
    return [(key.prompt_uid, key.sample_index) for key in batch.keys], batch.advantages.tolist()


NAN = float("nan")


def test_online_pairs_are_the_best_and_the_worst_of_each_group() -> None:
    """A missing reward is no candidate; ties and groups with one reward left give no pair."""
    samples = samples_of(5, 3)
    advantages = torch.tensor(
        [[0.1, -0.4, 0.3], [0.2, 0.2, 0.2], [NAN, 0.5, -0.5], [NAN, NAN, 0.9], [NAN, NAN, NAN]]
    ).flatten()
    order, values = chosen(DPOLoss, advantages, samples)
    assert order == [("prompt-0", 2), ("prompt-0", 1), ("prompt-2", 1), ("prompt-2", 2)]
    assert values == pytest.approx([0.3, -0.4, 0.5, -0.5])


def test_a_group_whose_samples_lie_apart_is_still_one_group() -> None:
    samples = samples_of(2, 3)
    mixed = torch.tensor([3, 0, 4, 1, 5, 2])
    advantages = torch.tensor([0.3, 0.9, 0.2, 0.1, 0.1, 0.5])
    order, _ = chosen(DPOLoss, advantages, samples.rows(mixed))
    assert order == [("prompt-1", 0), ("prompt-1", 2), ("prompt-0", 0), ("prompt-0", 1)]


def test_no_pair_at_all_is_an_empty_batch() -> None:
    order, values = chosen(DPOLoss, torch.full((6,), 0.4), samples_of(2, 3))
    assert order == values == []


@pytest.mark.parametrize("name", ["diffusion_nft", "awm", "distill_fm_mse"])
def test_other_losses_take_all_samples_with_a_reward(name: str) -> None:
    order, values = chosen(get_diffusion_loss_fn(name), torch.tensor([NAN, 0.2, 0.0, NAN]), samples_of(2, 2))
    assert order == [("prompt-0", 1), ("prompt-1", 0)]
    assert values == pytest.approx([0.2, 0.0])


def test_joined_samples_keep_their_prompts() -> None:
    """Tables of prompts of different lengths are padded to the longest."""
    short = replace(samples_of(1, 2), prompts=prompt_table([3], seed=1), advantages=None)
    long = replace(samples_of(2, 1, iteration=2), prompts=prompt_table([7, 5], seed=2), advantages=None)
    third = replace(samples_of(2, 1, iteration=3), prompts=prompt_table([2, 6], seed=3), advantages=None)
    joined = FinishedLatents.join([short, long, third])
    assert joined.keys == short.keys + long.keys + third.keys
    assert torch.equal(joined.latents, torch.cat([short.latents, long.latents, third.latents]))
    text = joined.prompts.expand(joined.prompt_index)
    assert text["prompt_embeds"].shape[:2] == (6, 7)
    assert torch.equal(text["prompt_embeds"][5, :6], third.prompts.prompt_embeds[1])
    assert torch.equal(text["prompt_embeds"][0, :3], short.prompts.prompt_embeds[0])
    assert torch.equal(text["prompt_embeds"][3], long.prompts.prompt_embeds[1])
    assert text["prompt_embeds_mask"].sum(1).tolist() == [3, 3, 7, 5, 2, 6]
    assert text["prompt_embeds"][0, 3:].abs().max() == 0


def guided_table(prompts: int, negatives: int, length: int, seed: int) -> PromptTable:
    """Prompts of one length with so many negative prompts, of a family that has more of both than tokens."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"": (prompts, 4), "negative_": (negatives, length)}
    tensors = {f"{name}prompt_embeds": torch.randn(*shape, 8, generator=draw) for name, shape in shapes.items()}
    tensors |= {f"{name}prompt_embeds_mask": torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}
    tensors |= {f"{name}pooled": torch.randn(rows, 3, generator=draw) for name, (rows, _) in shapes.items()}
    return PromptTable.of(tensors)


@pytest.mark.parametrize("kind", ["one for all", "one a table", "one a prompt"])
def test_joined_samples_keep_their_negative_prompts(kind: str) -> None:
    """Also where each batch has one of its own. What is shared is there once."""
    each = kind == "one a prompt"
    tables = [guided_table(n, n if each else 1, length, n) for n, length in ((2, 5), (1, 7), (3, 6))]
    if kind == "one for all":
        shared = {name: getattr(tables[0], name) for name in ("negative_prompt_embeds", "negative_prompt_embeds_mask")}
        extra = {"negative_pooled": tables[0].extras["negative_pooled"]}
        tables = [replace(table, **shared, extras={**table.extras, **extra}) for table in tables]
    joined, start = PromptTable.join(tables), 0
    assert len(joined.extras["negative_pooled"]) == (1 if kind == "one for all" else 6)
    for table in tables:
        index = torch.arange(len(table.prompt_embeds)).flip(0)
        found, own = joined.expand(index + start), table.expand(index)
        for name, tensor in own.items():
            rest = found[name][:, tensor.shape[1] :]
            assert torch.equal(found[name][:, : tensor.shape[1]], tensor), name
            assert not rest.any(), f"{name} is padded with nothing"
        start += len(index)


# ---- noise that a group shares, and levels of the whole schedule


@pytest.mark.parametrize("settings", [{"num_train_timesteps": 3}, LOGIT_NORMAL])
def test_a_group_shares_levels_and_noise_wherever_its_samples_are(settings: dict[str, Any]) -> None:
    """Each sample draws them from a key that names the prompt alone: cut and mixed anyhow they are the same."""
    samples = samples_of(3, 4)
    whole = noise(samples, share_noise_in_group=True, **settings)
    own = noise(samples, **settings)
    for name in ("noise", "sigmas"):
        groups = getattr(whole, name).unflatten(0, (3, 4))
        assert torch.equal(groups, groups[:, :1].expand_as(groups))
    assert len(whole.noise.unique(dim=0)) == 3
    assert not torch.isin(whole.noise[0, 0], own.noise).any()  # no sample's own
    assert torch.equal(whole.latents, samples.latents)
    for cut in ([5], [11, 0, 6], [3, 9, 1, 2]):
        part = noise(samples.rows(torch.tensor(cut)), share_noise_in_group=True, **settings)
        assert torch.equal(part.noise, whole.noise[cut])
        assert torch.equal(part.sigmas, whole.sigmas[cut])
        assert part.keys == tuple(samples.keys[i] for i in cut)
    later = noise(samples_of(3, 4, 2), share_noise_in_group=True, **settings)
    assert not torch.equal(later.noise, whole.noise)
    assert len(whole.noise.flatten(0, 1).unique(dim=0)) == 3 * whole.steps  # levels do not share theirs


def test_stratified_levels_are_one_of_each_part_of_the_schedule() -> None:
    """Five levels in two parts of three and two; each level of a part as often as the others of it."""
    drawn = noise(samples_of(2000, 1), timestep_sampling="stratified", num_train_timesteps=2).sigmas
    assert drawn.shape == (2000, 2)
    for column, part in ((0, SCHEDULE[:3]), (1, SCHEDULE[3:5])):
        counts = torch.tensor([(drawn[:, column] == level).sum().item() for level in part])
        share = 1 / len(part)
        assert counts.sum() == 2000
        assert (counts - 2000 * share).abs().max() < 5 * math.sqrt(2000 * share * (1 - share))
    every = noise(samples_of(4, 1), timestep_sampling="stratified", num_train_timesteps=5).sigmas
    assert torch.equal(every, SCHEDULE[:5].expand(4, -1))
    noisy_half = {"timestep_sampling": "stratified", "timestep_fraction": 0.6, "num_train_timesteps": 3}
    assert torch.equal(noise(samples_of(2, 1), **noisy_half).sigmas, SCHEDULE[:3].expand(2, -1))


def test_stratified_and_shared_the_levels_are_the_groups() -> None:
    settings = {"timestep_sampling": "stratified", "num_train_timesteps": 2, "share_noise_in_group": True}
    sigmas = noise(samples_of(30, 4), **settings).sigmas.unflatten(0, (30, 4))
    assert torch.equal(sigmas, sigmas[:, :1].expand_as(sigmas))
    assert len(sigmas[:, 0].unique(dim=0)) == 6  # 3 x 2 levels of the two parts


def test_the_draws_of_before_are_as_they_were() -> None:
    """Numbers written down before groups could share: a setting that is off changes no run."""
    drawn = noise(samples_of(1, 1), num_train_timesteps=2)
    assert drawn.sigmas.tolist() == [[0.9375, 0.5]]
    assert drawn.noise[0, :, 0, 0].tolist() == [-0.4572632312774658, -0.25481900572776794]


def test_stratified_asks_into_how_many_parts() -> None:
    with pytest.raises(ValueError, match="stratified but num_train_timesteps is null"):
        ForwardProcessConfig(timestep_sampling="stratified")
    with pytest.raises(ValueError, match=r"num_train_timesteps is 6, but timestep_fraction 1\.0 of 5 steps leaves 5"):
        noise(samples_of(1, 1), timestep_sampling="stratified", num_train_timesteps=6)


def test_a_share_of_the_levels_is_not_rounded_down_by_a_bit() -> None:
    config = ForwardProcessConfig(timestep_fraction=0.58)
    assert [config.levels_per_sample(steps) for steps in (1, 2, 49, 50)] == [1, 1, 28, 29]
