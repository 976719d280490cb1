# SPDX-License-Identifier: Apache-2.0
"""The process that serves one reward. What it imports is what every worker's start waits for, so it is little."""

import faulthandler
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from tasks.config.reward import RewardFunctionConfig
from tasks.rewards import Reward, RewardError, RewardResult, ScoredPrompt, get_reward
from tasks.rewards.served import ServedModel

STANDARD_ERROR = 2


class RewardWorker:
    """One process of one reward, its models loaded once.

    Args:
        name: registered name or import path.
        config: the reward's settings.
        asked: name of the `RewardModelServer` that the reward asks; None for one that asks nobody, or somebody else.
    """

    def __init__(self, name: str, config: RewardFunctionConfig, asked: str | None = None):
        self.name, self.config, self._asked = name, config, asked
        self._found: ServedModel | None = None
        self.reward = self._current_reward()

    def _current_reward(self) -> Reward:
        """The reward; a new one where the model that it asks has another address, having been started again."""
        if self._asked is None:
            return self.__dict__.get("reward") or get_reward(self.name, **self.config.options)
        server: Any = ray.get_actor(self._asked)
        found = ray.get(server.connection.remote())
        if found != self._found:
            found.enter_environment()
            self._found, self.reward = found, get_reward(self.name, **self.config.options)
        return self.reward

    def ready(self) -> str:
        """The reward's version, once its models are loaded."""
        return self.reward.version

    def score(self, first: int, prompts: Sequence[ScoredPrompt], *shards: np.ndarray) -> RewardResult | RewardError:
        """Score len(prompts) samples, from the `first` of these rollout batches on.

        Returns:
            the scores, or the RewardError of a reward that cannot be used so: no retry would help.
        """
        joined = shards[0] if len(shards) == 1 else np.concatenate(shards)
        self.reward = self._current_reward()
        start = time.perf_counter()
        # Its own thread ends the process also where Python code cannot: Ray starts another and repeats the call.
        faulthandler.dump_traceback_later(self.config.timeout_s, exit=True, file=STANDARD_ERROR)
        try:
            result = self.reward(joined[first : first + len(prompts)], prompts)
        except RewardError as error:
            return error
        except Exception:
            faulthandler.cancel_dump_traceback_later()
            time.sleep(self.config.retry_wait_s)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        return replace(result, seconds=time.perf_counter() - start)
