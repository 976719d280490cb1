# SPDX-License-Identifier: Apache-2.0
"""What a weight sync is proved by: digests of the weights, and a velocity that followed the last change."""

import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.rollout.diffusers import DiffusersRolloutEngine
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights import digests as weight_digests
from models.weights.canary import (
    Agreement,
    Canary,
    CanaryLayout,
    CanaryLimits,
    check_canary,
    check_velocity,
    missing_share,
    relative_difference,
)
from models.weights.digests import DigestBook, check_digests, digest, digests_of
from models.weights.trainable import WeightSyncError
from tests.support.helpers import actor_config, model_config, prompt_table, rollout_request
from tests.support.tiny_models import embeddings_of, save_stable_diffusion_3

pytestmark = pytest.mark.usefixtures("one_rank")

ON_CUDA = CanaryLimits(tolerance=0.01)
WORD = (1 << 64) - 1


def synced(trainer: DiffusersFSDPEngine, rollout: DiffusersRolloutEngine) -> None:
    rollout.load_weights(trainer.gather_weights())


def sent(trainer: DiffusersFSDPEngine) -> weight_digests.Digests:
    return digests_of(dict(trainer.whole_weights()), trainer.model_config.dtype)


@pytest.mark.parametrize(("lora_rank", "lr"), [(4, 1e-4), (0, 1e-5)])
def test_weights_one_update_old_are_refused_in_bf16(tiny_model: Path, lora_rank: int, lr: float) -> None:
    """The tolerance of CUDA would let them pass, in both updates; the new ones agree in every bit."""
    config = model_config(tiny_model, dtype="bfloat16", lora_rank=lora_rank, lora_alpha=8, true_cfg_scale=3.0)
    trainer, rollout = DiffusersFSDPEngine(config, actor_config(lr=lr)), DiffusersRolloutEngine(config)
    trainer.initialize()
    synced(trainer, rollout)
    check_digests(sent(trainer), digests_of(rollout.held_weights()), 0)
    _, samples = rollout.generate(rollout_request(samples=2, negative_length=4))
    canary = Canary(prompt_table((5, 3), 4), rows=4, timesteps=3)
    last = trainer.canary_velocity(canary)
    for version in (1, 2):
        trainer.update_policy([ActorBatch([(samples, torch.tensor([1.0, -0.8, 0.3, -1.5]))], 4)])
        now, stale = trainer.canary_velocity(canary), rollout.canary_velocity(canary)
        assert 0 < check_canary(now, stale, version, ON_CUDA.tolerance) < 0.01
        with pytest.raises(
            WeightSyncError, match=rf"version {version} .* lacks 1 of .* allowed 0.75: it still samples"
        ):
            check_velocity(now, stale, last, version, ON_CUDA)
        with pytest.raises(WeightSyncError, match=rf"version {version} .* tensors differ in their digests.*\['"):
            check_digests(sent(trainer), digests_of(rollout.held_weights()), version)

        synced(trainer, rollout)
        check_digests(sent(trainer), digests_of(rollout.held_weights()), version)
        moved = relative_difference(now, last)
        agreed = check_velocity(now, rollout.canary_velocity(canary), last, version, ON_CUDA)
        assert agreed == Agreement(0.0, moved, 0.0)
        last = now


def test_the_canary_asks_for_both_halves_of_the_guidance(tiny_model: Path) -> None:
    """Else an engine that takes another negative prompt, or none, would pass."""
    rollout = DiffusersRolloutEngine(model_config(tiny_model, true_cfg_scale=3.0))
    prompts = prompt_table((5, 3), 4)
    assert prompts.negative_prompt_embeds is not None
    other = replace(prompts, negative_prompt_embeds=prompts.negative_prompt_embeds + 1.0)
    found, changed = (rollout.canary_velocity(Canary(table, rows=4, timesteps=2)) for table in (prompts, other))
    assert found.shape[:2] == (2, 4)
    assert torch.equal(found[:, :2], changed[:, :2])
    assert not any(torch.allclose(one, two, atol=1e-3) for one, two in zip(found[0, 2:], changed[0, 2:], strict=True))


def test_the_first_sync_has_nothing_to_compare_its_change_with() -> None:
    velocity = torch.ones(1, 4)
    assert check_velocity(velocity, velocity, None, 0, CanaryLimits()) == Agreement(0.0, None, None)
    assert check_velocity(velocity, velocity, velocity, 0, CanaryLimits()) == Agreement(0.0, 0.0, None)


def noise(number: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(1, 20_000, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("older", [1, 3])
@pytest.mark.parametrize("rounding", [0.0, 0.1, 0.3, 0.5])
def test_the_missing_share_tells_new_from_old_through_rounding(rounding: float, older: int) -> None:
    """In units of one update's change. The limit is in between, for weights of one and of three updates ago."""
    changes, exact = [noise(number) for number in range(older)], 30 * noise(100)
    last, now = exact - changes[-1] + noise(10, rounding), exact + noise(11, rounding)
    stale, right = exact - sum(changes) + noise(12, rounding), exact + noise(13, rounding)
    expected = rounding**2 / (1 + 2 * rounding**2)
    assert missing_share(last, now, right) == pytest.approx(expected, abs=0.02)
    assert missing_share(last, now, stale) == pytest.approx(1 - expected, abs=0.04)
    limits = CanaryLimits(tolerance=1.0)
    check_velocity(now, right, last, 1, limits)
    with pytest.raises(WeightSyncError, match="older weights"):
        check_velocity(now, stale, last, 1, limits)


def test_right_weights_are_not_refused_where_rounding_hides_the_change() -> None:
    exact = 30 * noise(100)
    last, now, right = exact - noise(0) + noise(10, 9.0), exact + noise(11, 9.0), exact + noise(12, 9.0)
    assert check_velocity(now, right, last, 1, CanaryLimits(tolerance=1.0)).missing == pytest.approx(0.5, abs=0.05)


def test_the_worst_of_several_workers() -> None:
    assert Agreement.worst([Agreement(0.1, 0.5, 0.2), Agreement(0.2, 0.5, None)]) == Agreement(0.2, 0.5, 0.2)
    assert Agreement.worst([Agreement(0.1), Agreement(0.0)]) == Agreement(0.1, None, None)


def test_the_canary_is_batches_of_the_run_at_timesteps_of_its_schedule(tiny_model: Path) -> None:
    """Each prompt in turn, each row with its own noise; the half without the prompt hangs on the negative prompt."""
    engine = DiffusersRolloutEngine(model_config(tiny_model, true_cfg_scale=3.0))
    prompts = prompt_table((5, 3), 4)
    velocity = engine.canary_velocity(Canary(prompts, rows=6, timesteps=3))
    assert velocity.shape[:2] == (3, 4)
    assert engine.canary_velocity(Canary(prompts)).shape[:2] == (1, 4)
    assert engine.canary_velocity(Canary(prompts, rows=1, timesteps=9)).shape[:2] == (4, 2)
    assert len({tuple(row.flatten()[:4].tolist()) for step in velocity for row in step}) == 12
    assert prompts.negative_prompt_embeds is not None
    other = replace(prompts, negative_prompt_embeds=prompts.negative_prompt_embeds + 1)
    changed = engine.canary_velocity(Canary(other, rows=6, timesteps=3)) != velocity
    assert changed[:, 2:].flatten(2).any(2).all()
    assert not changed[:, :2].any()


def test_rows_that_a_timestep_lacks_change_no_number(tiny_model: Path) -> None:
    """Two batches of five rows: four, four and two of the timesteps. All rows count, and nothing else does."""
    engine = DiffusersRolloutEngine(model_config(tiny_model))
    velocity = engine.canary_velocity(Canary(prompt_table((5, 3)), rows=5, timesteps=3))
    assert velocity.shape[:2] == (3, 4)
    filled = velocity.flatten(2).any(2)
    assert filled.tolist() == [[True] * 4, [True] * 4, [True, True, False, False]]
    error = torch.randn(velocity.shape, generator=torch.Generator().manual_seed(0))
    other = velocity + filled[:, :, None, None] * error
    step = [(other[i, :n] - velocity[i, :n]).norm() / velocity[i, :n].norm() for i, n in enumerate((4, 4, 2))]
    assert relative_difference(velocity, other) == pytest.approx(max(step).item())


@pytest.mark.parametrize(("prompts", "rows", "steps"), [(2, 24, 3), (2, 8, 3), (2, 5, 3), (2, 1, 3), (3, 4, 5)])
def test_as_few_batches_as_can_be_show_every_prompt_at_every_timestep(prompts: int, rows: int, steps: int) -> None:
    """A batch has the rollout's size whatever it shows: a compiled model has the graph of that one alone."""
    layout = CanaryLayout.of(prompts, rows, steps)
    shown = set(zip(layout.prompt.flatten().tolist(), layout.step.flatten().tolist(), strict=True))
    assert shown == {(prompt, step) for prompt in range(min(prompts, rows)) for step in range(steps)}
    assert layout.prompt.shape == layout.step.shape == (math.ceil(min(prompts, rows) * steps / rows), rows)


def forwards(engine: DiffusersRolloutEngine) -> list[tuple[int, set[int]]]:
    """(rows, timesteps) of each forward pass from now on."""
    seen: list[tuple[int, set[int]]] = []
    forward = engine.transformer.forward

    def watched(*given: Any, timestep: Tensor, **more: Any) -> Any:
        seen.append((len(timestep), {*timestep.tolist()}))
        return forward(*given, timestep=timestep, **more)

    engine.transformer.forward = watched
    return seen


def test_one_forward_pass_of_a_batch_shows_all_timesteps(tiny_model: Path) -> None:
    """A sync's canary costs each side a step of the rollout, not one for each timestep."""
    engine = DiffusersRolloutEngine(model_config(tiny_model))
    seen = forwards(engine)
    engine.canary_velocity(Canary(prompt_table((5, 3)), rows=8, timesteps=3))
    ((rows, timesteps),) = seen
    assert (rows, len(timesteps)) == (8, 3)


@pytest.mark.parametrize(("one_pass", "sizes"), [(True, [12]), (False, [6, 6])])
def test_the_canary_asks_for_the_halves_of_the_guidance_as_the_rollout_does(
    tmp_path: Path, one_pass: bool, sizes: list[int]
) -> None:
    """Of another size a compiled model needs a graph that nothing else of the run does."""
    save_stable_diffusion_3(tmp_path / "model")
    config = model_config(tmp_path / "model", guidance_scale=4.5)
    engine, prompts = DiffusersRolloutEngine(config), embeddings_of(config, (5, 3), 5)
    seen = forwards(engine)
    velocity = engine.canary_velocity(Canary(prompts, rows=6, timesteps=3, one_pass=one_pass))
    assert [rows for rows, _ in seen] == sizes
    assert velocity.shape[:2] == (3, 4)


@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_one_matrix_that_was_left_as_it_was_is_refused_at_every_timestep(tiny_model: Path, matrix: str) -> None:
    """A partial update: all weights come but one matrix of the last block, whose rows are dealt out among timesteps."""
    config = model_config(tiny_model, lora_rank=4, lora_alpha=8)
    trainer, rollout = DiffusersFSDPEngine(config, actor_config(lr=1e-3)), DiffusersRolloutEngine(config)
    trainer.initialize()
    synced(trainer, rollout)
    _, samples = rollout.generate(rollout_request(samples=2))
    canary = Canary(prompt_table((5, 3)), rows=6, timesteps=3)
    advantages = torch.tensor([1.0, -0.8, 0.3, -1.5])
    for _ in range(2):  # at the first A has no gradient, since B is zero
        before, last = trainer.gather_weights(), trainer.canary_velocity(canary)
        trainer.update_policy([ActorBatch([(samples, advantages)], 4)])
    left = [name for name in before if "attn.to_q" in name and matrix in name][-1]
    now = trainer.canary_velocity(canary)
    rollout.load_weights(trainer.gather_weights() | {left: before[left]})
    held = rollout.canary_velocity(canary)
    assert all(relative_difference(now[[step]], held[[step]]) > 0 for step in range(3))
    with pytest.raises(WeightSyncError, match=r"velocity differs from the trainer's"):
        check_velocity(now, held, last, 2, CanaryLimits())
    with pytest.raises(WeightSyncError, match=rf"1 of \d+ tensors differ .* \['{left}'\]"):
        check_digests(sent(trainer), digests_of(rollout.held_weights()), 2)


def test_the_timesteps_are_the_schedules_first_and_last(tiny_model: Path) -> None:
    engine = DiffusersRolloutEngine(model_config(tiny_model))
    seen: list[float] = []
    forward = engine.transformer.forward

    def watched(*given: Any, timestep: Tensor, **more: Any) -> Any:
        seen.append(round(timestep[0].item() * 1000))
        return forward(*given, timestep=timestep, **more)

    engine.transformer.forward = watched
    engine.produce(rollout_request(samples=1))
    schedule, seen[:] = list(seen), []
    engine.canary_velocity(Canary(prompt_table((5, 3)), timesteps=2))
    engine.canary_velocity(Canary(prompt_table((5, 3))))
    assert seen == [schedule[0], schedule[-1], schedule[2]]


# ---- digests


def reference(content: bytes) -> int:
    """The formula in Python's own integers."""
    words = struct.unpack(f"<{len(content) // 8 + 1}Q", content + bytes(8 - len(content) % 8))
    total = 0
    for place, word in enumerate(words):
        x = (word + place * 0x9E3779B97F4A7C15) & WORD
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = ((x ^ x >> 33) * factor) & WORD
        total += x ^ x >> 33
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.fixture(params=[1 << 15, 3])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Words that are mixed at once."""
    monkeypatch.setitem(weight_digests.PIECE, "cpu", request.param)


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (8,), (5, 7)])
def test_a_digest_is_the_formulas(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    expected = reference(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert digest(tensor).item() == expected
    beside = torch.cat([torch.zeros(1, dtype=dtype), tensor.reshape(-1)])
    assert digest(beside[1:].view(shape)).item() == expected, "bytes that begin in the middle of a word"
    among = {"before": beside, "it": tensor, "it again": beside[1:].view(shape), "after": tensor.new_ones(3)}
    found = digests_of(among, dtype)
    assert [*found] == [*among]
    assert found["it"] == found["it again"] == {str(dtype): expected}, "also where small ones are digested together"
    assert found["after"][str(dtype)] == digest(among["after"]).item()
    if len(shape) == 2:
        assert digest(tensor.t().contiguous().t()).item() == expected, "rows that do not follow each other"


def test_a_digest_shows_every_bit_and_every_exchange() -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = {digest(tensor).item()}
    for place in range(64):
        for bit in (0, 7, 15):
            changed = tensor.view(torch.int16).clone()
            changed[place] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
            found.add(digest(changed.view(torch.bfloat16)).item())
        both = tensor.clone()
        both[[place, 3]] = -both[[place, 3]]
        found.add(digest(both).item())
        found.add(digest(tensor.roll(place)).item())
    # Place 3 with itself is the flip of its sign bit again, and a roll by 0 is the tensor.
    assert len(found) == 1 + 64 * 5 - 2


def test_digests_are_of_what_was_given_though_it_changes_afterwards() -> None:
    book, weights = DigestBook(torch.bfloat16), {f"w{i}": torch.full((3,), float(i)) for i in range(4)}
    expected = digests_of({name: tensor.clone() for name, tensor in weights.items()}, torch.bfloat16)
    for name, tensor in weights.items():
        book.add([(name, tensor)])
        tensor.zero_()
    assert book.digests() == expected


def test_small_weights_are_digested_in_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's call costs what thousands of words do: those of LoRA are many and small."""
    weights = {f"w{i}": torch.full((4, 3), float(i)) for i in range(100)}
    calls: list[int] = []
    mixed = weight_digests._mixed
    monkeypatch.setattr(weight_digests, "_mixed", lambda words: (calls.append(len(words)), mixed(words))[1])
    digests_of(weights, torch.bfloat16)
    assert len(calls) == 1


def test_large_weights_of_one_size_are_digested_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's are, whose blocks have each the same ones, of those that make a piece."""
    monkeypatch.setitem(weight_digests.LARGE, "cpu", 4)
    monkeypatch.setitem(weight_digests.PIECE, "cpu", 64)
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (7, 7), (24,), (3, 11), (6, 4), (4, 6), (2, 2), (8, 3), (4, 6), (100, 2), (100, 2), (7, 7)]
    weights = {f"w{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    expected = {name: {str(weight.dtype): digest(weight).item()} for name, weight in weights.items()}
    together: list[int] = []
    at_once = weight_digests.digests_of_equal_sizes
    monkeypatch.setattr(
        weight_digests,
        "digests_of_equal_sizes",
        lambda tensors: (together.append(len(tensors)), at_once(tensors))[1],
    )
    assert digests_of(weights) == expected
    assert together == [2, 4], "those of 24 floats: 49 and 33 are no whole words, 4 are few, and 200 a piece alone"


def test_weights_that_differ_are_named() -> None:
    weights = {f"w{i}": torch.full((3,), float(i)) for i in range(6)}
    both = digests_of(weights, torch.bfloat16)
    assert set(both["w0"]) == {"torch.float32", "torch.bfloat16"}
    held = {name: tensor.bfloat16() for name, tensor in weights.items()} | {"w5": weights["w5"]}
    check_digests(both, digests_of(held), 3)
    changed = held | {name: held[name] + 1 for name in ("w1", "w2", "w3", "w4")}
    with pytest.raises(WeightSyncError, match=r"policy version 3 .* 4 of 6 tensors .* \['w1', 'w2', 'w3'\]$"):
        check_digests(both, digests_of(changed), 3)
    with pytest.raises(WeightSyncError, match=r"6 of 6 tensors"):
        check_digests(both, {}, 3)
    with pytest.raises(WeightSyncError, match=r"1 of 7 tensors .* \['other'\]"):
        check_digests(both, digests_of(held | {"other": weights["w0"]}), 3)
    with pytest.raises(WeightSyncError, match=r"1 of 6 tensors .* \['w0'\]"):
        check_digests(both, digests_of(held | {"w0": weights["w0"].double()}), 3)


def test_velocities_of_nothing_are_equal_and_one_that_is_not_finite_is_named() -> None:
    """A network whose last layer is new says 0 everywhere: 0 / 0 is no failed sync."""
    nothing, something = torch.zeros(3, 2, 4), torch.ones(3, 2, 4)
    assert check_canary(nothing, nothing.clone(), 0, tolerance=0.0) == 0.0
    with pytest.raises(WeightSyncError, match="differs from the trainer's by inf"):
        check_canary(nothing, something, 0, tolerance=0.5)
    for trainer, rollout, whose in (
        (something * torch.nan, something, "trainer's"),
        (something, nothing / 0, "rollout"),
    ):
        with pytest.raises(WeightSyncError, match=rf"version 4 the {whose}.* velocity is not finite: look at the"):
            check_canary(trainer, rollout, 4, tolerance=0.5)
