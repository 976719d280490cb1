# SPDX-License-Identifier: Apache-2.0
"""Rewards in the form that VeRL-Omni documents, a sample a call: three of them, imports changed."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tasks.data.prompts import Prompt, build_prompt_table, load_prompts
from tasks.rewards import RewardError, get_reward, reward_input

HERE = "tests.tasks.rewards.test_ported_rewards"
BATCH = np.stack([np.full((4, 6, 3), value, np.uint8) for value in (0, 51, 255)])


def prompt(text: str, target: str | None = None, **metadata: Any) -> Prompt:
    return Prompt(text, text, target, metadata, "file:1")


PROMPTS = [
    prompt("a", "night", data_source="light", extra_info={"wanted": 0.2}),
    prompt("b", "night", data_source="light", extra_info={"wanted": 0.2}),
    prompt("c", None, data_source="dark", ground_truth="day"),
]


def compute_score(data_source, solution_image, ground_truth, extra_info=None, **kwargs):
    """The plain form: dispatched by the data set's name, and a number back."""
    assert isinstance(solution_image, torch.Tensor)
    assert solution_image.shape == (3, 4, 6)
    assert solution_image.dtype == torch.float32
    sign = {"light": 1.0, "dark": -1.0}[data_source]
    return sign * solution_image.mean().item()


async def compute_score_judged(
    data_source: str,
    solution_image,
    ground_truth: str,
    extra_info: dict,
    reward_router_address: str,
    reward_model_tokenizer=None,
    model_name: str | None = None,
):
    """The form of a served judge: its address by the reward's options, and a mapping back."""
    await asyncio.sleep(0)
    judged = f"{model_name}@{reward_router_address} {ground_truth}"
    return {"score": float(solution_image.max()), "genrm_response": judged, "wanted": extra_info.get("wanted")}


def compute_score_video(solution_image, ground_truth, extra_info):
    """The form of a video's: all frames at once, and a list back."""
    if extra_info["prompt"] == "b":
        raise OSError("no picture")
    assert solution_image.shape == (2, 3, 4, 6)
    return [(solution_image[1] - solution_image[0]).abs().mean().item(), 7.0]


def test_one_that_is_chosen_by_the_data_source() -> None:
    result = get_reward(f"{HERE}:compute_score")(BATCH, PROMPTS)
    assert result.scores == pytest.approx([0.0, 0.2, -1.0])
    assert result.details == {}


def test_one_that_asks_a_judge_gets_its_address_and_gives_details() -> None:
    reward = get_reward(f"{HERE}:compute_score_judged", reward_router_address="127.0.0.1:8000", model_name="vl")
    result = reward(BATCH, PROMPTS)
    assert result.scores == pytest.approx([0.0, 0.2, 1.0])
    assert result.details["genrm_response"][1:] == ["vl@127.0.0.1:8000 night", "vl@127.0.0.1:8000 day"]
    assert result.details["wanted"] == [0.2, 0.2, None]
    with pytest.raises(RewardError, match="the option reward_router_address is missing"):
        get_reward(f"{HERE}:compute_score_judged")


def test_one_of_videos_sees_all_frames_and_misses_one_sample() -> None:
    assert reward_input(f"{HERE}:compute_score_video") == "video"
    videos = np.stack([BATCH, BATCH[::-1]], axis=1)
    result = get_reward(f"{HERE}:compute_score_video")(videos, PROMPTS)
    assert result.scores == pytest.approx([1.0, np.nan, 1.0], nan_ok=True)
    assert result.details["error"] == [None, "OSError: no picture", None]


def test_where_every_sample_fails_the_batch_has_and_an_option_that_it_lacks_is_refused() -> None:
    with pytest.raises(KeyError, match="sea"):
        get_reward(f"{HERE}:compute_score")(BATCH[:1], [prompt("a", data_source="sea")])
    with pytest.raises(RewardError, match="unexpected keyword argument 'strength'"):
        get_reward(f"{HERE}:compute_score_video", strength=2)


def compute_score_nameless(solution_image, ground_truth, extra_info):
    """A mapping under another name than `score`, for two of three samples."""
    value = float(solution_image.max())
    return {"score": value} if extra_info["prompt"] == "c" else {"reward": value, "why": "bright"}


def test_a_mapping_without_score_is_a_sample_without_score() -> None:
    reward = get_reward(f"{HERE}:compute_score_nameless")
    result = reward(BATCH, PROMPTS)
    assert np.isnan(result.scores).tolist() == [True, True, False]
    assert result.details["error"][0] == (
        "ValueError: compute_score_nameless gives a mapping without `score`: reward, why"
    )
    with pytest.raises(ValueError, match="gives a mapping without `score`: reward, why"):
        reward(BATCH[:2], PROMPTS[:2])


ODD = {"a": None, "b": "0.75", "c": [], "d": [None], "e": [torch.tensor(0.5), 2], "f": np.float32(0.25), "g": b"1"}


def compute_score_odd(solution_image, ground_truth, extra_info):
    """What a judge that could not be reached leaves, or one whose answer nobody has read."""
    return {"score": ODD[extra_info["prompt"]], "why": "judge"}


def test_a_sample_without_a_number_is_missing_by_itself() -> None:
    reward = get_reward(f"{HERE}:compute_score_odd")
    prompts = [prompt(name) for name in ODD]
    result = reward(BATCH[[0] * len(prompts)], prompts)
    assert result.scores == pytest.approx([np.nan] * 4 + [0.5, 0.25, np.nan], nan_ok=True)
    assert result.details["why"] == ["judge"] * len(prompts)
    said = [error and error.removeprefix("ValueError: compute_score_odd gives ") for error in result.details["error"]]
    rest = " as the score, which is no number"
    assert said == [f"None{rest}", f"'0.75'{rest}", f"[]{rest}", f"None{rest}", None, None, f"b'1'{rest}"]
    with pytest.raises(ValueError, match=r"gives '0\.75' as the score, which is no number"):
        reward(BATCH[:1], prompts[1:2])


def compute_score_truth(solution_image, ground_truth):
    return {"score": 1.0, "truth": repr(ground_truth)}


@pytest.mark.parametrize("truth", [5, 0, [2, 3], {"colour": "red", "count": 2}, "five"])
def test_a_truth_of_any_kind_comes_from_the_parquet_row_to_the_function(tmp_path: Path, truth: Any) -> None:
    """A row's own `target` is another thing; `reward_model.ground_truth` is what such a function is written for."""
    rows = [
        {"prompt": "a", "reward_model": {"style": "rule", "ground_truth": truth}},
        {"prompt": "b", "reward_model": {"style": "rule", "ground_truth": None}},
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "raw.parquet")
    made = build_prompt_table([str(tmp_path / "raw.parquet")], n_test=0, n_train=None, seed=0, target_pattern="(.)")
    made.to_parquet(tmp_path / "prompts.parquet")
    result = get_reward(f"{HERE}:compute_score_truth")(BATCH[:2], load_prompts(tmp_path / "prompts.parquet"))
    assert result.details["truth"] == [repr(truth), "'b'"]


def compute_score_lacking(solution_image, extra_info):
    if extra_info["prompt"] == "no truth":
        raise RewardError("lacking: the prompt says nothing of what to look for")
    return 1.0


def test_what_no_retry_would_cure_ends_the_run_whatever_sample_has_it() -> None:
    with pytest.raises(RewardError, match=r"^lacking: the prompt says nothing"):
        get_reward(f"{HERE}:compute_score_lacking")(BATCH[:2], [prompt("a"), prompt("no truth")])
