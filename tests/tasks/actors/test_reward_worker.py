# SPDX-License-Identifier: Apache-2.0
"""What a reward's worker gives its reward, in this process."""

import numpy as np
import pytest

from tasks.actors.reward_worker import RewardWorker
from tasks.config.reward import RewardFunctionConfig
from tasks.data.prompts import Prompt
from tasks.rewards import Reward, RewardResult, ScoredPrompt

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
