# SPDX-License-Identifier: Apache-2.0
"""The process that serves one reward. What it imports is what every worker's start waits for, so it is little."""

import faulthandler
import time
from collections.abc import Sequence

import numpy as np

from tasks.config.reward import RewardFunctionConfig
from tasks.rewards import RewardError, RewardResult, ScoredPrompt, get_reward

STANDARD_ERROR = 2


class RewardWorker:
    """One process of one reward, its models loaded once."""

    def __init__(self, name: str, config: RewardFunctionConfig):
        self.config = config
        self.reward = get_reward(name, **config.options)

    def ready(self) -> str:
        """The reward's version, once its models are loaded."""
        return self.reward.version

    def score(
        self, first: int, prompts: Sequence[ScoredPrompt], *shards: np.ndarray
    ) -> tuple[RewardResult, float] | RewardError:
        """Score len(prompts) samples, from the `first` of these rollout batches on.

        Returns:
            (scores, seconds it took), or the RewardError of a reward that cannot be used so: no retry would help.
        """
        joined = shards[0] if len(shards) == 1 else np.concatenate(shards)
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
        return result, time.perf_counter() - start
