# SPDX-License-Identifier: Apache-2.0
"""Which reward scores a sample follows from its prompt's `data_source`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.data.prompts import Prompt
from tasks.rewards import RewardError, RewardResult, check_reward, get_reward, reward_input

SOURCES = {"plain": "jpeg_compressibility", "bright": {"reward": "brightness"}}


def prompt(source: str | None) -> Prompt:
    return Prompt("u", "a cup", None, {} if source is None else {"data_source": source}, "p.txt:1")


def test_each_sample_has_the_score_of_its_own_sources_reward() -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    prompts = [prompt(source) for source in ("bright", "plain", "bright", "plain", "plain")]
    result = get_reward("by_data_source", sources=SOURCES)(pictures, prompts)
    bright = get_reward("brightness")(pictures, prompts).scores
    plain = get_reward("jpeg_compressibility")(pictures, prompts).scores
    wanted = np.where([True, False, True, False, False], bright, plain)
    assert np.array_equal(result.scores, wanted)
    assert result.details["score_bright"] == [wanted[0], None, wanted[2], None, None]
    assert result.details["score_plain"] == [None, wanted[1], None, wanted[3], wanted[4]]


def test_a_failure_of_one_source_is_its_own() -> None:
    sources = {"bright": "brightness", "bad": f"{__name__}:fails"}
    result = get_reward("by_data_source", sources=sources)(
        np.zeros((2, 8, 8, 3), np.uint8), [prompt("bad"), prompt("bright")]
    )
    assert np.isnan(result.scores).tolist() == [True, False]
    assert result.details["error"] == ["no server", None]


def test_a_source_whose_reward_raises_loses_its_own_scores_alone() -> None:
    """Where all of them raise, that is the batch's error, and tried again."""
    reward = get_reward("by_data_source", sources={"bright": "brightness", "bad": f"{__name__}:raises"})
    pictures = np.zeros((2, 8, 8, 3), np.uint8)
    result = reward(pictures, [prompt("bad"), prompt("bright")])
    assert np.isnan(result.scores).tolist() == [True, False]
    assert result.details["error"] == ["RuntimeError: the server is down", None]
    with pytest.raises(RuntimeError, match="the server is down"):
        reward(pictures, [prompt("bad")] * 2)


def test_what_a_source_would_have_asked_again_is_asked_again() -> None:
    """A judge that ran out of its batch's time says which pictures those are."""
    reward = get_reward("by_data_source", sources={"bright": "brightness", "late": f"{__name__}:late"})
    prompts = [prompt(source) for source in ("late", "bright", "late", "late")]
    result = reward(np.zeros((4, 8, 8, 3), np.uint8), prompts)
    assert np.isnan(result.scores).tolist() == [False, False, True, True]
    assert result.raised == ((2, 3),)


def late(images: np.ndarray, prompts: Any) -> RewardResult:
    """Only the first was answered in time."""
    scores = np.full(len(images), np.nan, np.float32)
    scores[0] = 0.5
    return RewardResult(scores, raised=((1, 2),))


def raises(images: np.ndarray, prompts: Any) -> Any:
    raise RuntimeError("the server is down")


def motion(data_source: str, solution_image: Any, ground_truth: str, extra_info: Any) -> dict[str, float]:
    moved = float((solution_image[1:] - solution_image[:-1]).abs().mean()) if solution_image.ndim == 4 else 0.0
    return {"score": moved, "steps": float(solution_image.ndim)}


def test_a_reward_of_whole_videos_is_given_them() -> None:
    """Of another one's frames the mean counts, as without `by_data_source`; a picture is one."""
    sources = {"moves": f"{__name__}:motion", "bright": "brightness"}
    videos = np.random.default_rng(0).integers(0, 256, (2, 4, 8, 8, 3), np.uint8)
    prompts = [prompt("moves"), prompt("bright")]
    found = get_reward("by_data_source", sources=sources)
    apart = [
        get_reward(name)(videos[i : i + 1], prompts[:1]) for i, name in enumerate((sources["moves"], "brightness"))
    ]
    assert found(videos, prompts).scores.tolist() == [one.scores[0] for one in apart]
    assert apart[0].scores[0] > 0.1
    assert reward_input("by_data_source", sources=sources) == "video"
    assert reward_input("by_data_source", sources=SOURCES) == "images"
    pictures = found(videos[:, 0], prompts)
    assert (pictures.scores[0], pictures.details["steps_moves"]) == (0.0, [3.0, None])
    assert pictures.scores[1] == get_reward("brightness")(videos[1:, 0], prompts[1:]).scores[0]


def test_models_of_all_sources_are_told(tmp_path: Path) -> None:
    given = {"model": str(tmp_path), "device": "cuda"}
    source = {"reward": "clip_score", "options": given | {"dtype": "bfloat16"}}
    wide = {"reward": "clip_score", "options": given | {"dtype": "float32"}}
    found = check_reward("by_data_source", sources=SOURCES | {"clip": source})
    assert isinstance(found, type)
    assert found.gpu_models({"sources": SOURCES}) == ([], "")
    assert found.gpu_models({"sources": SOURCES | {"clip": source}}) == ([tmp_path], "bfloat16")
    assert found.gpu_models({"sources": {"clip": source, "wide": wide}}) == ([tmp_path, tmp_path], "float32")


def fails(images: np.ndarray, prompts: Any) -> Any:
    from tasks.rewards import RewardResult

    return RewardResult(np.full(len(images), np.nan), {"error": ["no server"] * len(images)})


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ({}, "sources must name a reward for each data_source"),
        ({"a": 3}, "sources 'a' must be a reward's name, or `reward` and `options`"),
        ({"a": {"reward": "ocr", "weight": 2}}, "sources 'a' must be a reward's name"),
        ({"a:b": "ocr"}, "sources 'a:b' names a metric"),
        ({"a//b": "ocr"}, "sources 'a//b' names a metric"),
        ({"a/../b": "ocr"}, "sources 'a/../b' names a metric"),
        ({"a" * 61: "ocr"}, "sources 'a+' names a metric: at most 60 letters"),
        ({"a": "no_reward"}, "there is no reward 'no_reward'"),
        ({"a": {"reward": "ocr", "options": {"no": 1}}}, "reward 'ocr': got an unexpected keyword"),
        ({"a": "remote_latents"}, "remote_latents"),
        ({"a": {"reward": "by_data_source", "options": {"sources": SOURCES}}}, "cannot be one of them"),
    ],
)
def test_what_is_no_reward_is_refused_before_anything_loads(sources: Any, complaint: str) -> None:
    with pytest.raises(RewardError, match=complaint):
        check_reward("by_data_source", sources=sources)


@pytest.mark.parametrize("source", ["other", None])
def test_a_source_without_a_reward_is_refused_before_anything_loads(source: str | None) -> None:
    found = check_reward("by_data_source", sources=SOURCES)
    assert isinstance(found, type)
    found.check_prompts("by_data_source", {"sources": SOURCES}, [prompt("plain")])
    with pytest.raises(RewardError, match=f"'a cup' has data_source {source!r}; sources names plain, bright"):
        found.check_prompts("by_data_source", {"sources": SOURCES}, [prompt("plain"), prompt(source)])
