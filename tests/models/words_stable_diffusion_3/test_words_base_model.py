# SPDX-License-Identifier: Apache-2.0
"""The words model: prompts, tokenizers, encoders, pipeline, and a pre-training that ends where it should."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from flows.prepare_words import check_gate
from models.words_stable_diffusion_3 import pretrain as pretraining
from models.words_stable_diffusion_3.build import (
    CLIP_TOKENS,
    LETTERS,
    T5_TOKENS,
    build_clip_tokenizer,
    build_pipeline,
    build_t5_tokenizer,
    build_transformer,
    merge_chain,
)
from models.words_stable_diffusion_3.pretrain import pretrain
from models.words_stable_diffusion_3.render import INKS, PAPERS, make_prompts, render_picture, render_pictures, word_of
from models.words_stable_diffusion_3.settings import WordsSettings, smallest
from tasks.config.params import GateParams, PrepareError
from tasks.data.prompts import COLUMNS
from tasks.data.words_base_model import words_prompt_table

SMALL = smallest()
FULL = WordsSettings()
PROMPTS = make_prompts(SMALL)
LEARNT = PROMPTS[SMALL.n_test :]


@functools.cache
def full_prompts() -> list[str]:
    """All 60192 of the words model: half a second of work."""
    return make_prompts(FULL)


def quiet(stage: str, step: int, steps: int, values: dict[str, float]) -> None:
    """A progress function that says nothing."""


def nothing(pictures: np.ndarray, prompts: list[str]) -> float:
    """A measurement that is never enough."""
    return 0.0


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    return build_pipeline(SMALL)


# ---- prompts and pictures


def test_no_word_stands_in_two_prompts() -> None:
    words = [word_of(prompt) for prompt in full_prompts()]
    assert len(words) == len(set(words)) == FULL.n_test + FULL.n_train + FULL.n_pretrain


def test_every_split_has_words_of_the_same_lengths() -> None:
    """There are too few short words for all, so the order in which words are found must not decide the splits."""
    lengths = [len(word_of(prompt)) for prompt in full_prompts()]
    assert np.mean(lengths[:2000]) == pytest.approx(np.mean(lengths[-2000:]), abs=0.15)


def test_the_prompt_table_has_every_split_and_the_words_as_targets() -> None:
    table = words_prompt_table(SMALL)
    assert tuple(table.columns) == COLUMNS
    assert table["split"].value_counts().to_dict() == {"pretrain": 40, "train": 12, "test": 6}
    assert [prompt.split()[2] for prompt in table["prompt"]] == [*table["target"]]
    assert table["uid"].is_unique
    assert words_prompt_table(replace(SMALL, seed=1))["prompt"].tolist() != table["prompt"].tolist()


def test_a_picture_shows_its_ink_on_its_paper() -> None:
    for prompt in PROMPTS[:8]:
        picture = render_picture(prompt, SMALL)
        assert picture.shape == (SMALL.height, SMALL.width, 3)
        _, _, _, _, ink, _, paper = prompt.split()
        colours = {tuple(colour) for colour in picture.reshape(-1, 3).tolist()}
        assert tuple(picture[0, 0]) == PAPERS[paper]
        assert min(np.abs(np.subtract(colour, INKS[ink])).sum() for colour in colours) < 30


def test_the_longest_words_fit_the_frame() -> None:
    """A letter that stood beyond the edge would be cut off."""
    for prompt in ("the word mamomam in black on white", "the word momamom in black on white"):
        columns = (render_picture(prompt, FULL) != PAPERS["white"][0]).any((0, 2))
        assert not columns[:3].any()
        assert not columns[-3:].any()


def test_pictures_do_not_depend_on_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.words_stable_diffusion_3.render.CHUNK", 5)
    assert np.array_equal(render_pictures(PROMPTS[:12], SMALL, 2), render_pictures(PROMPTS[:12], SMALL, 1))


# ---- tokenizers and encoders


def test_every_pseudo_word_is_a_row_of_letters_and_every_other_word_one_token() -> None:
    tokenizer = build_clip_tokenizer()
    for prompt in full_prompts()[::50]:
        _, _, word, _, ink, _, paper = prompt.split()
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(prompt).input_ids)
        assert tokens[3:-7] == [*word[:-1], f"{word[-1]}</w>"], prompt
        assert (tokens[1], tokens[2], tokens[-5], tokens[-2]) == ("the</w>", "word</w>", f"{ink}</w>", f"{paper}</w>")
        assert len(tokens) <= CLIP_TOKENS


def test_the_longest_prompt_fills_clip_and_every_prompt_fills_t5() -> None:
    prompts = full_prompts()[::20]
    assert max(map(len, build_clip_tokenizer()(prompts).input_ids)) == CLIP_TOKENS
    assert {*map(len, build_t5_tokenizer()(prompts).input_ids)} == {T5_TOKENS}


def test_a_word_spelt_like_a_pseudo_word_cannot_be_one_token() -> None:
    with pytest.raises(ValueError, match="'red' is spelt like a pseudo-word"):
        merge_chain("red")


def embeds(pipeline: StableDiffusion3Pipeline, prompt: str) -> torch.Tensor:
    """[tokens, width]."""
    return pretraining.encode_text(pipeline, [prompt])[0][0]


def test_another_letter_is_another_vector_at_its_place_alone(pipeline: StableDiffusion3Pipeline) -> None:
    one, other = (
        embeds(pipeline, "the word bakomi in black on pink"),
        embeds(pipeline, "the word bakoni in black on pink"),
    )
    assert (one != other).any(-1).nonzero().flatten().tolist() == [7]
    assert one.shape == (CLIP_TOKENS + T5_TOKENS, SMALL.text_width)


def test_the_order_of_letters_is_seen(pipeline: StableDiffusion3Pipeline) -> None:
    one, other = (embeds(pipeline, f"the word {word} in black on pink") for word in ("bako", "kabo"))
    assert (one != other).any(-1).nonzero().flatten().tolist() == [3, 5]
    assert not torch.equal(one[3], other[5])


def test_a_letter_at_the_end_is_that_letter_with_the_ends_mark(pipeline: StableDiffusion3Pipeline) -> None:
    vocab, table = pipeline.tokenizer.get_vocab(), pipeline.text_encoder.get_input_embeddings().weight
    marks = [table[vocab[f"{letter}</w>"]] - table[vocab[letter]] for letter in LETTERS]
    assert all(torch.allclose(mark, marks[0], atol=1e-6) for mark in marks)
    assert marks[0].norm() > 1


# ---- the pipeline and its training


def test_only_the_transformer_and_vae_learn(pipeline: StableDiffusion3Pipeline) -> None:
    encoders = (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3)
    assert not any(p.requires_grad for encoder in encoders for p in encoder.parameters())
    assert all(p.requires_grad for p in pipeline.transformer.parameters())
    assert not torch.equal(*(encoder.get_input_embeddings().weight for encoder in encoders[:2]))


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    build_pipeline(SMALL)
    assert torch.equal(before, torch.get_rng_state())


def test_the_transformer_of_the_defaults_has_250_million_weights() -> None:
    with torch.device("meta"):
        transformer = build_transformer(FULL)
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(250e6, rel=0.01)


def test_pretraining_repeats_itself_and_the_folder_is_whole(tmp_path: Path) -> None:
    made = pretrain(LEARNT, SMALL, "cpu", quiet, nothing)
    made.save_pretrained(tmp_path / "one")
    torch.rand(7)  # a different global state must not matter
    pretrain(LEARNT, SMALL, "cpu", quiet, nothing).save_pretrained(tmp_path / "two")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    loaded = StableDiffusion3Pipeline.from_pretrained(tmp_path / "one")
    loaded.set_progress_bar_config(disable=True)
    pictures = [sample(p) for p in (made, loaded)]
    assert pictures[0].shape == (2, SMALL.height, SMALL.width, 3)
    assert np.array_equal(*pictures)
    assert pictures[0].std() > 0


def sample(pipeline: StableDiffusion3Pipeline) -> np.ndarray:
    """Two uint8 pictures from fixed noise."""
    images = pipeline(
        PROMPTS[:2],
        height=SMALL.height,
        width=SMALL.width,
        num_inference_steps=2,
        guidance_scale=1.0,
        max_sequence_length=T5_TOKENS,
        generator=torch.Generator().manual_seed(0),
    ).images
    return np.stack([np.asarray(image) for image in images])


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def losses_of(**changes: int) -> dict[str, float]:
    """Last loss of each part of a training with these changes to the small settings."""
    losses: dict[str, float] = {}

    def record(stage: str, step: int, steps: int, values: dict[str, float]) -> None:
        losses[stage] = values["loss"]

    pretrain(LEARNT, replace(SMALL, **changes), "cpu", record, nothing)  # type: ignore[arg-type]
    return losses


def test_both_parts_learn() -> None:
    long, none = losses_of(vae_steps=40, max_steps=60, measure_every=15), losses_of(vae_steps=1, max_steps=1)
    assert long["vae"] < 0.8 * none["vae"]
    assert long["transformer"] < 0.9 * none["transformer"]


def test_what_is_measured_or_held_out_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def spy(prompts: list[str], *rest: int) -> np.ndarray:
        drawn.extend(prompts)
        return render_pictures(prompts, *rest)  # type: ignore[arg-type]

    watched: list[list[str]] = []

    def measure(pictures: np.ndarray, prompts: list[str]) -> float:
        assert pictures.shape == (SMALL.watched, SMALL.height, SMALL.width, 3)
        watched.append(prompts)
        return 0.0

    monkeypatch.setattr(pretraining, "render_pictures", spy)
    pretrain(LEARNT, SMALL, "cpu", quiet, measure)
    assert drawn == LEARNT[: -SMALL.watched]
    assert watched[-1] == LEARNT[-SMALL.watched :]


def steps_of(rewards: Callable[[int], float], **changes: float) -> list[int]:
    """Steps after which the transformer was measured; `rewards` is what the n-th measurement finds, from 0."""
    steps: list[int] = []
    count = 0

    def measure(pictures: np.ndarray, prompts: list[str]) -> float:
        nonlocal count
        count += 1
        return rewards(count - 1)

    def record(stage: str, step: int, total: int, values: dict[str, float]) -> None:
        if stage == "transformer":
            steps.append(step)

    settings: Any = {"max_steps": 12, "decay_steps": 0, "least_reward": 0.0} | changes
    pretrain(LEARNT, replace(SMALL, **settings), "cpu", record, measure)
    return steps


def test_training_ends_at_the_first_measurement_that_is_good_enough() -> None:
    rewards = [0.1, 0.3, 0.4, 0.5, 0.6]
    assert steps_of(rewards.__getitem__, target_reward=0.5) == [4, 8, 9, 10]
    assert steps_of(rewards.__getitem__, target_reward=0.5, decay_steps=3) == [4, 8, 9, 10, 13]


def test_what_reads_too_little_at_the_end_is_trained_on_until_it_does_not() -> None:
    rewards = [0.5, 0.3, 0.4, 0.45, 0.6]
    settings = {"target_reward": 0.5, "decay_steps": 3, "more_steps": 2, "max_steps": 40}
    assert steps_of(rewards.__getitem__, **settings, least_reward=0.44) == [4, 7, 9, 11]
    assert steps_of(rewards.__getitem__, **settings, least_reward=0.3) == [4, 7]
    assert steps_of(lambda n: 0.5 / (n + 1), **settings | {"max_steps": 10}, least_reward=0.44) == [4, 7, 9, 11]


def test_training_ends_at_the_last_step_whatever_was_reached() -> None:
    assert steps_of(lambda n: 0.0, target_reward=0.5, max_steps=6) == [4, 6]


def test_learning_rates_rise_stay_and_fall_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = pretraining.TransformerTraining.step

    def spy(training: pretraining.TransformerTraining, latents: torch.Tensor, rate: float) -> torch.Tensor:
        rates.append(rate)
        return step(training, latents, rate)

    monkeypatch.setattr(pretraining.TransformerTraining, "step", spy)
    pretrain(LEARNT, replace(SMALL, max_steps=3, decay_steps=4, warmup_steps=2), "cpu", quiet, nothing)
    assert rates == [0.5, 1, 1, 1, 0.75, 0.5, 0.25]
    rates.clear()
    again = replace(SMALL, max_steps=8, target_reward=0.0, decay_steps=4, more_steps=4, more_rate=0.4)
    pretrain(LEARNT, again, "cpu", quiet, nothing)
    assert rates == pytest.approx([1, 0.75, 0.5, 0.25, 0.4, 0.3, 0.2, 0.1])


def test_a_measurement_sees_the_average_and_changes_no_weight(pipeline: StableDiffusion3Pipeline) -> None:
    transformer = pipeline.transformer
    own = [p.detach().clone() for p in transformer.parameters()]
    average = [p + 1 for p in own]
    seen: list[bool] = []

    def watch(model: torch.nn.Module) -> float:
        seen.append(all(torch.equal(p, a) for p, a in zip(model.parameters(), average, strict=True)))
        return 0.25

    assert pretraining.measured(transformer, average, watch) == 0.25
    assert seen == [True]
    assert all(torch.equal(p, o) for p, o in zip(transformer.parameters(), own, strict=True))


# ---- the gate

GATE = GateParams(prompts=1, images_per_prompt=1, steps=1, seed=0, min_reward=0.45, max_reward=0.55)


def test_the_gate_lets_the_middle_through() -> None:
    for reward in (GATE.min_reward, 0.5, GATE.max_reward):
        check_gate(reward, GATE)


@pytest.mark.parametrize(("reward", "change"), [(0.4, "higher"), (0.6, "lower")])
def test_the_gate_says_what_to_change(reward: float, change: str) -> None:
    with pytest.raises(
        PrepareError, match=rf"held-out reward {reward:.3f} is not within .*; set a {change} words.model.target_reward"
    ):
        check_gate(reward, GATE)
