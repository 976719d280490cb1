# SPDX-License-Identifier: Apache-2.0
"""The registry, the OCR and JPEG rewards, and their sum."""

import asyncio
import json
import os
import random
import subprocess
import sys
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from models.tiny_qwen_image.render import render_picture
from models.tiny_qwen_image.settings import TinySettings
from tasks.actors.reward_group import Scores, trained_reward
from tasks.actors.reward_pool import RewardFailure, RewardPool, answers_table
from tasks.actors.reward_worker import filled_in
from tasks.config.reward import RewardConfig
from tasks.config.tracking import TrackingConfig
from tasks.records.tracking import Tracker
from tasks.rewards import (
    Reward,
    RewardError,
    RewardResult,
    check_reward,
    get_reward,
    known_rewards,
    register_reward,
    reward_input,
    weighted_sum,
    with_group_means,
)
from tasks.rewards.jpeg import jpeg_kilobytes
from tasks.rewards.ocr import OcrReward, compared, edit_distance, wanted_text
from tests.support.mlflow_store import mlflow_in

ROOT = Path(__file__).parents[3]


@dataclass
class Wanted:
    """A prompt, as a reward sees it."""

    prompt: str
    target: str | None = None
    metadata: dict = field(default_factory=dict)


@pytest.fixture(scope="module")
def ocr() -> Reward:
    return get_reward("ocr")


def picture_of(text: str, seed: int = 0, noise: float = 0.0) -> np.ndarray:
    """`text` as the base model's training pictures show it: uint8 [24, 48, 3]."""
    picture = render_picture(text, TinySettings(), random.Random(seed)).astype(np.float64)
    picture += noise * np.random.default_rng(seed).standard_normal(picture.shape)
    return picture.round().clip(0, 255).astype(np.uint8)


# --- the registry


def mean_brightness(images: np.ndarray, prompts: list, scale: float = 1.0) -> np.ndarray:
    """A reward as a plain function."""
    return scale * images.mean(axis=(1, 2, 3)) / 255


class Redness(Reward):
    """A reward as a class outside the registry."""

    name = "redness"
    version = "7"

    def score(self, images, prompts):
        return RewardResult(images[..., 0].mean(axis=(1, 2)))


class OneTooFew(Redness):
    """A reward that forgets an image."""

    def score(self, images, prompts):
        return RewardResult(np.zeros(len(images) - 1))


def test_rewards_are_found_by_name_and_by_import_path():
    assert {"brightness", "jpeg_compressibility", "jpeg_incompressibility", "ocr", "shapes"} <= set(known_rewards())
    assert known_rewards() == sorted(known_rewards())
    images = np.full((2, 4, 4, 3), 255, dtype=np.uint8)
    prompts = [Wanted("a"), Wanted("b")]
    half = get_reward(f"{__name__}:mean_brightness", scale=0.5)
    result = half(images, prompts)
    assert result.scores.tolist() == [0.5, 0.5]
    assert result.scores.dtype == np.float32
    assert half.name == f"{__name__}:mean_brightness"
    assert half.version.startswith("source-")
    redness = get_reward(f"{__name__}:Redness")
    assert (redness.version, redness(images, prompts).scores.tolist()) == ("7", [255, 255])


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        (
            "orc",
            {},
            r"no reward 'orc'; did you mean ocr\?; known are .*jpeg_compressibility, jpeg_incompressibility.*, ocr",
        ),
        ("no.such.module:f", {}, "'no.such.module:f' cannot be imported: No module named 'no'"),
        (f"{__name__}:nothing", {}, "cannot be imported: .* has no attribute 'nothing'"),
        (f"{__name__}:__doc__", {}, "is a str; it must be a subclass of tasks.rewards.Reward or a function"),
        (f"{__name__}:Misspelt", {}, "wants is 'latent'; it should be one of images, video, latents"),
        ("tests.support.a_script:f", {}, "imported: tests.support.a_script ends the process .exit code 0.$"),
        (f"{__name__}:mean_brightness", {"power": 2}, "unexpected keyword argument 'power'; it takes .*scale"),
        ("ocr", {"tarset": "column"}, "reward 'ocr': .* unexpected keyword argument 'tarset'; it takes .*target"),
        ("ocr", {"target": "prompt"}, "reward 'ocr': target is 'prompt'; it should be 'column' or 'quoted'"),
        ("ocr", {"upscale": 0}, "reward 'ocr': upscale is 0; it should be greater than 0"),
        ("ocr", {"upscale": "2e0"}, "reward 'ocr': upscale is '2e0'; it should be a valid integer$"),
        ("ocr", {"rec_image_shape": [3, 48]}, r"rec_image_shape is \[3, 48\]; it has too few entries"),
        ("tesseract", {"margin": -1}, "reward 'tesseract': margin is -1; it should be greater than or equal to 0"),
        ("remote", {"url": "http://x", "timeout_s": 0}, "reward 'remote': timeout_s is 0; it should be greater than 0"),
        ("remote", {"url": "scorer:8100"}, "reward 'remote': url is 'scorer:8100'; it should begin with http:// or"),
        (
            "remote",
            {"url": "http://"},
            "reward 'remote': url is 'http://'; it should begin with http:// .* name a host",
        ),
        ("remote", {"url": "http://[x"}, r"url is 'http://\[x'; it should begin with http://"),
        ("remote", {"url": "me:word@scorer"}, "url is 'scorer'; it should begin with http://"),
        ("remote", {"url": 8100}, "url is 8100; it should be a valid string"),
        ("shapes", {"contrast": 256}, "reward 'shapes': contrast is 256; it should be less than or equal to 255"),
        ("shapes", {"min_pixels": 0}, "reward 'shapes': min_pixels is 0; it should be greater than 0"),
        (
            f"{__name__}:mean_brightness",
            {"scale": "1e-3"},
            "scale is '1e-3'; it should be a valid number: write 1.0e-3, as YAML takes 1e-3 for text$",
        ),
        (
            f"{__name__}:later",
            {"scale": "2.5e3"},
            r"scale is '2.5e3', which is text to YAML: write 2.5e\+3 for the number",
        ),
    ],
)
def test_unknown_names_and_options_are_refused_before_a_reward_is_made(name, options, complaint):
    with pytest.raises(RewardError, match=complaint):
        check_reward(name, **options)


async def later(images, prompts, scale=1.0):
    """A reward that waits for something."""
    await asyncio.sleep(0)
    return RewardResult(scale * images.mean(axis=(1, 2, 3)), {"text": [p.metadata["text"] for p in prompts]})


class SameLoop(Redness):
    """Keeps something that belongs to one event loop, as a connection does."""

    def __init__(self):
        self.gate = None

    async def score(self, images, prompts):
        if self.gate is None:
            self.gate = asyncio.get_running_loop().create_future()
            self.gate.set_result(3.0)
        return np.full(len(images), await self.gate)


def test_a_module_that_is_no_python_is_a_sentence_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "unfinished_reward.py").write_text("def score(images, prompts):\n    return images.mean(\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        RewardError, match=r"cannot be imported: '\(' was never closed \(unfinished_reward.py, line 2\)"
    ):
        get_reward("unfinished_reward:score")


class Movement(Redness):
    """Wants whole videos: how far the first frame is from the last."""

    wants = "video"

    def score(self, videos, prompts):
        return np.abs(videos[:, -1].astype(float) - videos[:, 0]).mean(axis=(1, 2, 3))


class Misspelt(Redness):
    """Would be given pictures."""

    wants = "latent"


class Norm(Redness):
    """Wants latents."""

    wants = "latents"

    def score(self, latents, prompts):
        return np.sqrt((latents**2).sum(axis=(1, 2)))


def test_a_score_may_be_a_coroutine_and_knows_the_samples_metadata():
    images = np.full((2, 4, 4, 3), 100, dtype=np.uint8)
    prompts = [Wanted("a", metadata={"text": "x"}), Wanted("b", metadata={"text": "y"})]
    result = get_reward(f"{__name__}:later", scale=0.1)(images, prompts)
    assert (result.scores.tolist(), result.details) == ([10, 10], {"text": ["x", "y"]})
    reward = SameLoop()
    assert [reward(images, prompts).scores.tolist() for _ in range(2)] == [[3, 3]] * 2


def test_frames_of_a_video_are_scored_one_by_one_unless_the_reward_wants_videos():
    videos = np.zeros((2, 3, 4, 4, 3), dtype=np.uint8)
    videos[0, :, :, :, 0] = np.array([30, 60, 90])[:, None, None]
    prompts = [Wanted("a"), Wanted("b")]
    assert Redness()(videos, prompts).scores.tolist() == [60, 0]
    assert Movement()(videos, prompts).scores.tolist() == [20, 0]
    assert Movement()(videos[:, 0], prompts).scores.tolist() == [0, 0], "a picture is a video of one frame"
    texts = get_reward(f"{__name__}:later")(videos, [Wanted("a", metadata={"text": t}) for t in "xy"])
    assert texts.details["text"] == [["x"] * 3, ["y"] * 3]


def test_latents_go_to_the_rewards_that_want_them():
    latents = np.zeros((2, 5, 4), np.float32)
    latents[0, 0, 0] = 7
    assert Norm()(latents, [Wanted("a"), Wanted("b")]).scores.tolist() == [7, 0]
    with pytest.raises(RewardError, match="latents must be float32"):
        Norm()(latents.astype(np.float64), [Wanted("a"), Wanted("b")])
    assert reward_input(f"{__name__}:Norm") == "latents"
    assert reward_input("ocr", threads=2) == "images"


def ill(images, prompts):
    """What the prompts ask for, as the score."""
    return RewardResult(np.array([float(p.prompt) for p in prompts]), {"error": [p.target for p in prompts]})


def test_a_score_that_is_not_finite_is_missing_and_says_what_it_was():
    """Also one that float32 cannot hold. A reason of the reward's own stays, and a finite score needs none."""
    given = ["0.5", "inf", "-inf", "nan", "1e300", "inf"]
    prompts = [Wanted(text) for text in given[:-1]] + [Wanted("inf", "the light was off")]
    result = get_reward(f"{__name__}:ill")(np.zeros((6, 4, 4, 3), np.uint8), prompts)
    assert np.array_equal(result.scores, np.array([0.5] + [np.nan] * 5, np.float32), equal_nan=True)
    said = [f"the reward itself returned {value}" for value in ("inf", "-inf", "nan", "1e+300")]
    assert result.details["error"] == [None, *said, "the light was off"]
    bare = Redness()(np.zeros((1, 4, 4, 3), np.uint8), prompts[:1])
    assert bare.details == {}


class Brighter(Redness):
    """Scores of frames whose sum float32 cannot hold, and an infinite one for white frames."""

    def score(self, images, prompts):
        means = images.mean(axis=(1, 2, 3))
        return np.where(means == 255, np.inf, 3e38)


def test_a_video_is_missing_where_a_frame_is_and_large_scores_have_a_mean():
    videos = np.zeros((2, 3, 4, 4, 3), np.uint8)
    videos[0, 1] = 255
    result = Brighter()(videos, [Wanted("a"), Wanted("b")])
    assert np.isnan(result.scores[0])
    assert result.scores[1] == pytest.approx(3e38)
    assert result.details["error"] == ["the reward itself returned inf", None]


def test_what_was_not_finite_is_counted():
    table = pd.DataFrame({"uid": list("ab"), "reward/x": [np.nan, 1.0], "reward/y": np.float32([np.nan, np.nan])})
    table["x/error"] = ["the reward itself returned inf", None]
    table["y/error"] = ["ConnectionError: no", "ConnectionError: no"]
    metrics = Scores(table, {"x": 1.0, "y": 1.0}, {}).metrics()
    assert (metrics["reward/x/missing"], metrics["reward/x/not_finite"]) == (1, 1)
    assert (metrics["reward/y/missing"], metrics["reward/y/not_finite"]) == (2, 0)


def odd_details(images, prompts):
    """Each prompt's metadata as the details."""
    return RewardResult(np.zeros(len(images)), {key: [p.metadata[key] for p in prompts] for key in prompts[0].metadata})


MIXED = {
    "text": ([1, "x"], ["1", "x"]),
    "bool": ([True, 2.5], ["True", "2.5"]),
    "list": ([[1], {"a": 2}], ["[1]", "{'a': 2}"]),
    "large": ([2**70, 1], [str(2**70), "1"]),
    "digits": ([10**5000, "x"], ["a value that cannot be written (int)", "x"]),
    "surrogate": (["\ud800", "x"], ["\\ud800", "x"]),
    "none": ([None, "x"], [None, "x"]),
    "gap": ([np.nan, "x"], [None, "x"]),
    "numbers": ([np.float32(0.5), np.int64(2)], [0.5, 2]),
    "bools": ([np.bool_(True), None], [True, None]),
    "error": ([np.nan, 3], [None, "3"]),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_detail_is_of_one_kind_and_any_table_can_be_written(name, tmp_path):
    given, expected = MIXED[name]
    prompts = [Wanted("a", metadata={name: value}) for value in given]
    result = get_reward(f"{__name__}:odd_details")(np.zeros((2, 4, 4, 3), np.uint8), prompts)
    assert result.details[name] == expected
    assert [type(value) for value in result.details[name]] == [type(value) for value in expected]
    pd.DataFrame(result.details).to_parquet(tmp_path / "samples.parquet", index=False)


@pytest.mark.parametrize("name", ["acc@5", "p(yes)", "", "../x", "a//b", "n" * 101])
def test_numbers_under_a_name_that_no_metric_has_end_the_run_at_the_first_scores(name):
    """MLflow would refuse the whole iteration's metrics after it; text is no metric and may be called anything."""
    reward, images = get_reward(f"{__name__}:odd_details"), np.zeros((2, 4, 4, 3), np.uint8)
    with pytest.raises(RewardError, match="holds numbers and would be a metric"):
        reward(images, [Wanted("a", metadata={name: value}) for value in (None, 0.5)])
    text = reward(images, [Wanted("a", metadata={name: value}) for value in ("x", None)])
    assert text.details[name] == ["x", None]


@pytest.mark.parametrize("name", ["acc_at-5 of 9", "flow_grpo/ocr", "é: .5", "n" * 100])
def test_a_details_name_is_one_that_mlflow_takes(name, tmp_path):
    prompts = [Wanted("a", metadata={name: value}) for value in (1, 0.5)]
    (detail,) = get_reward(f"{__name__}:odd_details")(np.zeros((2, 4, 4, 3), np.uint8), prompts).details
    Tracker(TrackingConfig(uri=mlflow_in(tmp_path)), "a-run").log_step(1, {f"train/{'l' * 100}/{detail}/mean": 0.75})


@pytest.mark.parametrize(
    ("first", "second", "written"),
    [
        ([1, 2], ["x"], ["1", "2", "x"]),
        ([True, False], [0.5], ["True", "False", "0.5"]),
        ([[1, 2], [3, 4]], [["x", None]], [["1", "2"], ["3", "4"], ["x", None]]),
        (["x", "y"], None, ["x", "y", None]),
    ],
)
def test_calls_whose_details_differ_in_kind_make_one_table(first, second, written, tmp_path):
    later = RewardResult(np.ones(1, np.float32), {"late": [2.5]} | ({} if second is None else {"d": second}))
    table = answers_table("r", [RewardResult(np.zeros(len(first)), {"d": first}), later])
    assert table["reward/r"].dtype == np.float32
    assert table["reward/r"].tolist() == [0.0] * len(first) + [1.0]
    assert [*table] == ["reward/r", "r/d", "r/late"]
    assert table["r/late"].isna().tolist() == [True] * len(first) + [False]
    table.to_parquet(tmp_path / "samples.parquet", index=False)
    read = pd.read_parquet(tmp_path / "samples.parquet")["r/d"]
    assert [list(v) if isinstance(v, np.ndarray) else (None if pd.isna(v) else v) for v in read] == written


def test_a_name_is_registered_once():
    with pytest.raises(RewardError, match="'ocr' is already registered by OcrReward"):
        register_reward("ocr")(Redness)
    assert Redness.name == "redness"


def test_every_reward_checks_what_goes_in_and_out():
    reward = Redness()
    with pytest.raises(RewardError, match=r"uint8 \[B, H, W, 3\] or \[B, F, H, W, 3\], not float32 \(1, 4, 4, 3\)"):
        reward(np.zeros((1, 4, 4, 3), np.float32), [Wanted("a")])
    with pytest.raises(RewardError, match="2 images came with 1 prompts"):
        reward(np.zeros((2, 4, 4, 3), np.uint8), [Wanted("a")])
    with pytest.raises(RewardError, match=r"of 2 images it must return one value each, not {'scores': \(1,\)}"):
        OneTooFew()(np.zeros((2, 4, 4, 3), np.uint8), [Wanted("a")] * 2)


# --- OCR


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2), ("472", "472", 0)],
)
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == distance


def test_ocr_reads_the_training_pictures(ocr):
    texts = [f"{n:03d}" for n in random.Random(0).sample(range(1000), 24)]
    images = np.stack([picture_of(text, seed) for seed, text in enumerate(texts)])
    result = ocr(images, [Wanted(f"the number {text}", text) for text in texts])
    assert result.scores.mean() > 0.98
    assert np.mean(result.details["exact"]) > 0.9
    assert len(result.details["text"]) == len(texts)


def test_ocr_scores_are_one_minus_the_share_of_wrong_characters(ocr):
    images = np.stack([picture_of("472")] * 5)
    targets = ["472", "471", "427", "4 7 2", "72"]
    result = ocr(images, [Wanted("p", target) for target in targets])
    assert result.scores == pytest.approx([1, 2 / 3, 1 / 3, 1, 1 / 2])
    assert result.details["exact"] == [1, 0, 0, 1, 0]
    blank = ocr(np.full((1, 24, 48, 3), 245, np.uint8), [Wanted("p", "472")])
    assert (blank.scores.tolist(), blank.details["text"]) == ([0], [""])


def test_ocr_reads_pictures_together_as_it_does_one_by_one(monkeypatch, ocr):
    """As it does on a GPU: more of them than a pass takes, in their order, and every pass of one shape."""
    images = np.stack([picture_of(f"{n:03d}", n) for n in range(0, 1000, 77)])
    seen, infer = list[tuple[int, ...]](), ocr._reader.ocr.text_rec.session
    prompts = [Wanted("p", "1")] * len(images)
    alone = [ocr(image[None], prompts[:1]).details["text"][0] for image in images]
    assert len(set(alone)) == len(images)
    assert ocr(images, prompts).details["text"] == alone
    monkeypatch.setattr(ocr._reader, "lines_a_pass", 5)
    monkeypatch.setattr(ocr._reader.ocr.text_rec, "session", lambda lines: seen.append(lines.shape) or infer(lines))
    assert ocr(images, prompts).details["text"] == alone
    assert ocr(images[:2], prompts[:2]).details["text"] == alone[:2]
    assert [shape[0] for shape in seen] == [5, 5, 5, 5]
    assert len(set(seen)) == 1


def test_ocr_on_a_gpu_is_refused_where_onnxruntime_has_none():
    """Before anything loads; and by the worker that finds no GPU: onnxruntime itself would go on on the CPU."""
    lacking = r"the option device is cuda, but the onnxruntime of .* is one for CPUs: install onnxruntime-gpu there in"
    with pytest.raises(RewardError, match=lacking):
        check_reward("ocr", device="cuda")
    with pytest.raises(RewardError, match="device is 'gpu'; it should be 'cpu' or 'cuda'"):
        check_reward("ocr", device="gpu")
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(RewardError, match=r"found no GPU to compute on here \(it has CPUExecutionProvider\): install"),
    ):
        OcrReward(device="cuda")


def test_ocr_does_not_mind_case(ocr):
    result = ocr(picture_of("OK")[None], [Wanted("p", "ok")])
    assert (result.details["text"], result.scores.tolist()) == (["OK"], [1])


@pytest.mark.parametrize("spelling", ["NFC", "NFD"])
def test_ocr_reads_a_letter_and_its_mark_in_either_spelling(spelling):
    """A reader gives one character where a data set may have two: such a target could never be read in full."""
    wanted = wanted_text(Wanted("p", unicodedata.normalize(spelling, "Caf\u00e9")), "column", "ocr")
    found = compared(["cafe\u0301", "CAF\u00c9", "cafe"], [wanted] * 3)
    assert found.scores == pytest.approx([1, 1, 0.75])
    assert found.details["exact"] == [1, 1, 0]


def test_ocr_may_accept_the_target_anywhere():
    images = np.stack([picture_of("472")] * 2)
    result = get_reward("ocr", substring_is_full=True)(images, [Wanted("p", "72"), Wanted("p", "42")])
    assert result.scores == pytest.approx([1, 1 / 2])
    assert result.details["exact"] == [0, 0]


def test_ocr_may_take_the_target_from_quotes():
    quoted = get_reward("ocr", target="quoted")
    assert quoted(picture_of("472")[None], [Wanted('a sign that says "472"', "ignored")]).scores.tolist() == [1]
    with pytest.raises(RewardError, match="'a sign' has no text in double quotes"):
        quoted(picture_of("472")[None], [Wanted("a sign", "472")])


def test_ocr_without_a_target_is_an_error_and_no_zero(ocr):
    for target in (None, " "):
        with pytest.raises(RewardError, match=r"'the number 472' has no target \(see prompts.target_pattern\)"):
            ocr(picture_of("472")[None], [Wanted("the number 472", target)])


@pytest.mark.parametrize(
    ("name", "options", "scored", "other"),
    [
        *((name, {}, Wanted("a sign", "open"), Wanted('a sign "open"')) for name in ("ocr", "tesseract", "judge_ocr")),
        ("ocr", {"target": "quoted"}, Wanted('a sign "open"'), Wanted("a sign", "open")),
        ("ocr", {}, Wanted("a sign", "open"), Wanted("a sign", " ")),
        ("ink_and_paper", {}, Wanted("open in blue on white"), Wanted("open in blue")),
        ("shapes", {}, Wanted("three red circles"), Wanted("circles")),
    ],
)
def test_a_prompt_that_cannot_be_scored_is_known_before_anything_is_loaded(name, options, scored, other):
    reward = check_reward(name, **options)
    reward.check_prompts(name, options, [scored])
    with pytest.raises(RewardError, match=rf"^{name}: the prompt '{other.prompt}' .*(has no|must)"):
        reward.check_prompts(name, options, [scored, other])


def test_ocr_does_not_depend_on_the_rest_of_the_batch(ocr):
    texts = [f"{n:03d}" for n in random.Random(1).sample(range(1000), 24)]
    images = np.stack([picture_of(text, seed, noise=70) for seed, text in enumerate(texts)])
    prompts = [Wanted("p", text) for text in texts]
    together = ocr(images, prompts)
    assert 0 < together.scores.mean() < 1
    alone = [ocr(images[i : i + 1], prompts[i : i + 1]) for i in range(len(texts))]
    assert [r.details["text"][0] for r in alone] == together.details["text"]
    assert [r.scores[0] for r in alone] == together.scores.tolist()


def test_the_recogniser_itself_gives_the_same_bits_in_any_batch(ocr):
    """Which is why another version of the reward may batch again, should that ever be faster."""
    recogniser = ocr._reader.ocr.text_rec
    pictures = [np.repeat(np.repeat(picture_of("472", i, noise=70), 2, 0), 2, 1) for i in range(7)]
    batch = np.stack([recogniser.resize_norm_img(picture, 2.0) for picture in pictures])

    def read(pictures: np.ndarray) -> np.ndarray:  # the older package lists the network's outputs
        found = recogniser.session(pictures)
        return found[0] if isinstance(found, list) else found

    assert np.array_equal(read(batch), np.concatenate([read(batch[i : i + 1]) for i in range(len(batch))]))


def test_ocr_can_look_for_the_text_in_a_larger_picture():
    picture = np.full((256, 384, 3), 245, np.uint8)
    small = picture_of("472")
    picture[150:222, 200:344] = np.repeat(np.repeat(small, 3, 0), 3, 1)
    result = get_reward("ocr", detect=True, upscale=1)(
        np.stack([picture, np.full_like(picture, 245)]), [Wanted("p", "472")] * 2
    )
    assert (result.details["text"], result.scores.tolist()) == (["472", ""], [1, 0])


def test_a_picture_is_looked_at_as_it_is_unless_it_is_to_be_enlarged():
    """Which reads the same here, and costs as many times as much as there are more pixels."""
    picture = np.full((224, 320, 3), 245, np.uint8)
    picture[80:152, 90:234] = np.repeat(np.repeat(picture_of("472"), 3, 0), 3, 1)
    costs, versions = {}, {}
    for limit, pixels in (("max", (224, 320)), ("min", (736, 1056))):
        options = {"detect": True, "upscale": 1, "det_limit_type": limit}
        reward = get_reward("ocr", **options)
        detector = reward._reader.ocr.text_det
        assert detector.get_preprocess(320)(picture).shape == (1, 3, *pixels)
        result = reward(picture[None], [Wanted("p", "472")])
        assert (result.details["text"], result.scores.tolist()) == (["472"], [1])
        costs[limit], versions[limit] = OcrReward.core_seconds(options, 512 * 512), reward.version
    assert costs["min"] / costs["max"] == pytest.approx(736**2 / 512**2)
    assert versions["max"] != versions["min"], "another picture may be read otherwise"
    assert get_reward("ocr", detect=True).version == versions["max"]


PAGES_OF_A_PICTURE = """
import json
import resource

import numpy as np
import onnxruntime

from tasks.rewards import get_reward

detector = get_reward("ocr", detect=True)._reader.ocr.text_det
kept = (detector.session if hasattr(detector, "session") else detector.infer).session
options = kept.get_session_options()
assert options.enable_cpu_mem_arena
options.enable_cpu_mem_arena = False
given_back = onnxruntime.InferenceSession(kept._model_path, options, kept.get_providers())
picture = {kept.get_inputs()[0].name: np.random.default_rng(0).random((1, 3, 512, 512), np.float32)}
pages, found = [], []
for session in (kept, given_back):
    for _ in range(2):  # the buffers' plan is made by the first and laid out by the second
        session.run(None, picture)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    found.append(session.run(None, picture)[0])
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps({"pages": pages, "same": bool(np.array_equal(*found))}))
"""


def test_the_detector_keeps_its_buffers_from_one_picture_to_the_next():
    """In place of asking the system for thousands of pages anew; it finds the same.

    In a process of its own whose C library gives back every large buffer, as it does unless much was freed before.
    """
    here = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    at_once = here | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", PAGES_OF_A_PICTURE]
    done = subprocess.run(command, env=at_once, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout)
    kept, given_back = answer["pages"]
    assert answer["same"]
    assert given_back > 1_000
    assert kept < given_back / 10


def test_versions_name_what_the_scores_depend_on(ocr):
    reader = "rapidocr==3.4.5" if sys.version_info >= (3, 13) else "rapidocr-onnxruntime==1.4.4"
    assert reader in ocr.version.split()
    assert "pillow==" in get_reward("jpeg_compressibility").version
    assert isinstance(ocr, OcrReward)


# --- JPEG


def test_jpeg_rewards_are_sizes_in_kilobytes():
    rng = np.random.default_rng(0)
    images = np.stack([np.zeros((32, 32, 3)), rng.integers(0, 256, (32, 32, 3))]).astype(np.uint8)
    prompts = [SimpleNamespace(prompt="p", target=None, metadata={})] * 2
    sizes = [jpeg_kilobytes(image) for image in images]
    assert 0.3 < sizes[0] < 1 < sizes[1] < 5
    big = get_reward("jpeg_incompressibility")(images, prompts).scores
    small = get_reward("jpeg_compressibility")(images, prompts).scores
    assert big == pytest.approx(sizes)
    assert np.array_equal(small, -big)


# --- their sum


def test_weighted_sum():
    results = {"a": np.array([1, 0.5, np.nan], np.float32), "b": np.array([0, 1, 1], np.float32)}
    total = weighted_sum(results, {"a": 2.0, "b": -1.0})
    assert total.dtype == np.float32
    assert np.array_equal(total, np.array([2, 0, np.nan], np.float32), equal_nan=True)
    assert weighted_sum(results, {"a": 0, "b": 1.0}).tolist() == [0, 1, 1]
    large = weighted_sum({"a": np.array([3e38, 1.0], np.float32)}, {"a": 10.0})
    assert np.array_equal(large, np.array([np.nan, 10.0], np.float32), equal_nan=True), "beyond float32"
    with pytest.raises(RewardError, match=r"rewards \['a', 'b'\] need a weight each, but the weights are for \['a'\]"):
        weighted_sum(results, {"a": 1.0})
    with pytest.raises(RewardError, match="every reward has weight 0"):
        weighted_sum(results, {"a": 0, "b": 0})


def test_samples_that_are_scored_again_have_what_was_found_then_and_the_others_what_they_had():
    nan = np.nan
    first = {"error": [None, "away", "away"], "read": ["cat", "dog", None]}
    again = {"error": ["still away", None], "seen": [3, 4]}
    joined = filled_in(
        RewardResult(np.array([1.0, nan, nan], np.float32), first, seconds=2.0),
        np.array([1, 2]),
        RewardResult(np.array([nan, 0.5], np.float32), again, seconds=0.5),
    )
    assert np.array_equal(joined.scores, np.array([1.0, nan, 0.5], np.float32), equal_nan=True)
    assert joined.details == {
        "error": [None, "still away", None],
        "read": ["cat", None, None],
        "seen": [None, 3, 4],
    }
    assert joined.seconds == 2.5, "of both"


def test_an_optional_reward_that_is_missing_says_nothing_about_its_sample():
    """Its advantage is what the other rewards give it, and the others of the group are compared as before."""
    nan = np.nan
    uids = np.array(list("aaabbcc"))
    taste = np.array([1, nan, 3, nan, nan, 5, nan], np.float32)
    filled = with_group_means(taste, uids)
    assert filled.tolist() == [1, 2, 3, 3, 3, 5, 5]
    assert with_group_means(np.full(7, nan, np.float32), uids).tolist() == [0] * 7
    text = np.arange(7, dtype=np.float32)
    functions = RewardConfig(functions={"text": {}, "taste": {"required": False, "weight": 2.0}}).functions
    total = trained_reward({"text": text, "taste": taste}, functions, uids)
    centred = total[:3] - total[:3].mean()
    assert centred[1] == pytest.approx(text[1] - text[:3].mean())
    functions = RewardConfig(functions={"text": {}, "taste": {"weight": 2.0}}).functions
    required = trained_reward({"text": text, "taste": taste}, functions, uids)
    assert np.isnan(required).tolist() == np.isnan(taste).tolist()


@pytest.mark.parametrize(("settings", "has_part"), [({}, False), ({"guard": True}, True)], ids=["required", "guard"])
def test_a_sample_without_a_sum_has_no_part_in_what_stands_for_a_missing_optional_reward(settings, has_part):
    """Its own score, which nobody is compared with, would else be for or against the sample that lacks one. One reward
    of several that it needs is enough; a guard is in no sum, so a sample that lacks that alone has one."""
    nan, uids = np.nan, np.array(list("aaaa"))
    text, other = np.full(4, 0.5, np.float32), np.array([nan, 0.25, 0.25, 0.25], np.float32)
    taste = np.array([1.0, nan, 0.2, 0.2], np.float32)
    functions = RewardConfig(functions={"text": {}, "other": settings, "taste": {"required": False}}).functions
    total = trained_reward({"text": text, "other": other, "taste": taste}, functions, uids)
    if has_part:
        assert total == pytest.approx([1.5, 0.5 + 1.4 / 3, 0.7, 0.7])
    else:
        assert np.isnan(total[0])
        assert total[1:] == pytest.approx([0.95] * 3)


# --- the configuration


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"functions": {}}, "name at least one reward"),
        ({"functions": {"ocr": {"guard": True}}}, "all are guards or have weight 0"),
        ({"functions": {"ocr": {"guard": True, "weight": 0.5}, "jpeg": {}}}, "a guard is never trained on"),
        (
            {"functions": {"ocr": {"placement": "colocated", "num_gpus": 0.5}}},
            "num_gpus 0.5 asks for others: leave num_gpus out, or set placement to separate",
        ),
        ({"functions": {"ocr": {"num_workers": 0}}}, "num_workers"),
        ({"max_missing_fraction": 1.5}, "max_missing_fraction"),
    ],
)
def test_reward_settings_that_make_no_sense_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        RewardConfig.model_validate(settings)


def test_workers_do_not_make_another_run_and_guards_survive_being_written_out():
    from tasks.config.tree import TrainConfig

    def config(**entry):
        return TrainConfig(reward={"functions": {"ocr": entry, "jpeg_compressibility": {"guard": True}}})

    assert config(num_workers=3, batch_size=7, retries=0, timeout_s=9, num_gpus=1).digest() == config().digest()
    assert config(weight=0.5).digest() != config().digest()
    assert config(required=False).digest() != config().digest()
    written = TrainConfig.model_validate(config().model_dump(mode="json"))
    assert {name: entry.share for name, entry in written.reward.functions.items()} == {
        "ocr": 1.0,
        "jpeg_compressibility": 0.0,
    }


@pytest.mark.parametrize(
    ("missing", "limit", "passes"), [(0, 0.0, True), (1, 0.0, False), (2, 0.25, True), (3, 0.25, False), (8, 1.0, True)]
)
def test_as_many_scores_may_be_missing_as_the_fraction_says(missing: int, limit: float, passes: bool) -> None:
    """Of eight; none of them, and exactly the fraction, pass."""
    pool = RewardPool.__new__(RewardPool)  # without its workers
    pool.name = "ocr"
    scores, errors = [np.nan] * missing + [0.5] * (8 - missing), ["out of order"] * missing + [None] * (8 - missing)
    table = pd.DataFrame({"reward/ocr": scores, "ocr/error": errors})
    if passes:
        pool._check_missing(table, limit, None)
    else:
        with pytest.raises(RewardFailure, match=rf"'ocr' is missing for {missing} of 8 samples.*{limit:g} allows; its"):
            pool._check_missing(table, limit, None)
