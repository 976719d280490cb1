# SPDX-License-Identifier: Apache-2.0
"""What a reward's worker gives its reward, in this process."""

from pathlib import Path

import numpy as np
import pytest

from tasks.actors.reward_worker import RewardWorker
from tasks.config.reward import RewardFunctionConfig
from tasks.data.prompts import Prompt
from tasks.rewards import Reward, RewardResult, ScoredPrompt

UNRELIABLE = "tests.support.unreliable_rewards"
FRAMES = np.array([10, 20, 30, 40, 50, 60, 70, 80, 90])


class Level(Reward):
    """Mean of all channels of a picture, and of which pictures it was asked."""

    name, version = "level", "1"

    def score(self, batch: np.ndarray, prompts: object) -> RewardResult:
        levels = batch.reshape(len(batch), -1).mean(1)
        return RewardResult(levels, {"seen": levels.tolist()})


class FrameCount(Level):
    """Wants whole videos."""

    wants = "video"

    def score(self, batch: np.ndarray, prompts: object) -> RewardResult:
        return RewardResult(np.full(len(batch), float(batch.shape[1])))


def scored(reward: str, batch: np.ndarray, interval: int) -> RewardResult:
    worker = RewardWorker(f"{__name__}:{reward}", RewardFunctionConfig(frame_interval=interval))
    prompts: list[ScoredPrompt] = [Prompt(str(number), "", None, {}, "") for number in range(len(batch))]
    found = worker.score(0, prompts, batch, np.ones(len(batch), bool))
    assert isinstance(found, RewardResult)
    return found


@pytest.mark.parametrize(("interval", "seen"), [(1, FRAMES), (4, [10, 50, 90]), (5, [10, 60]), (9, [10])])
def test_a_reward_of_pictures_is_asked_about_every_so_many_frames(interval: int, seen: list[int]) -> None:
    videos = np.zeros((2, 9, 4, 6, 3), np.uint8)
    videos[0] = FRAMES[:, None, None, None]
    found = scored("Level", videos, interval)
    assert found.scores.tolist() == pytest.approx([np.mean(seen), 0])
    assert found.details["seen"] == [list(seen), [0] * len(seen)]


def test_pictures_and_what_wants_whole_videos_lose_nothing() -> None:
    pictures = np.full((9, 4, 6, 3), 7, np.uint8)
    assert scored("Level", pictures, 4).scores.tolist() == [7] * 9
    assert scored("FrameCount", np.zeros((2, 9, 4, 6, 3), np.uint8), 4).scores.tolist() == [9, 9]


@pytest.mark.parametrize("shape", [(), (3,)], ids=["pictures", "videos"])
@pytest.mark.parametrize(("attempts", "retries"), [(1, 1), (2, 2), (1, 0), (2, 1)])
def test_a_source_that_raises_beside_others_is_asked_again_alone(
    tmp_path: Path, attempts: int, retries: int, shape: tuple[int, ...]
) -> None:
    """As often as a reward that raises by itself; what is left is missing, each source's samples with its own error.
    The first sample is shown to nobody."""
    fails = {"good": 0, "passing": attempts, "lasting": 9}
    for source in fails:
        (tmp_path / source).mkdir()
    sources = {
        source: {
            "reward": f"{UNRELIABLE}:fails_before",
            "options": {"folder": str(tmp_path / source), "attempts": count},
        }
        for source, count in fails.items()
    }
    of = ["lasting", "good", "passing", "lasting", "good", "passing"]
    prompts: list[ScoredPrompt] = [Prompt(str(i), "", None, {"data_source": name}, "") for i, name in enumerate(of)]
    levels = np.arange(10, 70, 10, np.uint8).reshape(6, *[1] * len(shape), 1, 1, 1)
    batch = np.broadcast_to(levels, (6, *shape, 4, 6, 3))
    settings = RewardFunctionConfig(options={"sources": sources}, retries=retries, retry_wait_s=0)
    found = RewardWorker("by_data_source", settings).score(0, prompts, batch, np.arange(6) > 0)
    assert isinstance(found, RewardResult)
    comes = retries >= attempts
    scores = [np.nan, 20, 30 if comes else np.nan, np.nan, 50, 60 if comes else np.nan]
    assert np.array_equal(found.scores, np.array(scores, np.float32), equal_nan=True)
    refused = f"ConnectionError: attempt {retries + 1} was refused"
    assert found.details["error"][1:] == [None, None if comes else refused, refused, None, None if comes else refused]
    calls = {source: len((tmp_path / source / "calls").read_text()) for source in fails}
    assert calls == {"good": 1, "passing": min(attempts, retries) + 1, "lasting": retries + 1}


def test_what_raises_otherwise_each_time_has_the_error_of_its_own_source(tmp_path: Path) -> None:
    sources = {
        "good": "brightness",
        "refused": {
            "reward": f"{UNRELIABLE}:fails_before",
            "options": {"folder": str(tmp_path), "attempts": 9},
        },
        "dark": f"{UNRELIABLE}:fails_for_dark",
    }
    prompts: list[ScoredPrompt] = [Prompt("u", "", None, {"data_source": name}, "") for name in sources]
    settings = RewardFunctionConfig(options={"sources": sources}, retries=2, retry_wait_s=0)
    worker = RewardWorker("by_data_source", settings)
    found = worker.score(0, prompts, np.zeros((3, 4, 6, 3), np.uint8), np.ones(3, bool))
    assert isinstance(found, RewardResult)
    told = ["ConnectionError: attempt 3 was refused", "ConnectionError: the lens cap is on"]
    assert found.details["error"] == [None, *told]
