# SPDX-License-Identifier: Apache-2.0
"""The process that serves one reward. What it imports is what every worker's start waits for, so it is little."""

import faulthandler
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

from models.errors import DoubleflowError
from tasks.actors.call_ends import CallEnd, has_lost_a_process, how_calls_ended, noted_call
from tasks.actors.loading import limited_again
from tasks.config.reward import RewardFunctionConfig
from tasks.rewards import Reward, RewardError, RewardResult, ScoredPrompt, get_reward
from tasks.rewards.chat import asked_within
from tasks.rewards.served import ServedModel
from tasks.system.collector import collects_once_loaded

STANDARD_ERROR = 2
VIDEOS = 5
"""Dimensions of a batch of them, [B, F, H, W, 3]."""
SAMPLE_NOT_FINITE = "the sample is not finite: there is a NaN or an infinity in its latents, log-probs or pixels"
"""The error of a score that no reward was asked for."""


class RewardRaised(Exception):
    """What a reward raised, as "ValueError: ...": an error of the reward's own kind need not survive the way to another
    process."""


class RewardWorker:
    """One process of one reward, its models loaded once, by its first call: one that dies while they load has failed in
    a call, which Ray repeats a few times, where it would start a process that dies in `__init__` again for ever.

    Args:
        name: registered name or import path.
        config: the reward's settings.
        asked: name of the `RewardModelServer` that the reward asks; None for one that asks nobody, or somebody else.
        load_seconds: what the models have to load in a process that was started again, see `limited_again`.
    """

    def __init__(self, name: str, config: RewardFunctionConfig, asked: str | None = None, load_seconds: float = inf):
        self.name, self.config, self._asked, self._load_seconds = name, config, asked, load_seconds
        self._found: ServedModel | None = None

    @collects_once_loaded
    def _current_reward(self, doubted: ServedModel | None = None) -> Reward:
        """The reward; a new one where the model that it asks has another address, having been started again.

        Args:
            doubted: the address, where asking there gave no scores.

        Raises:
            NotServed: the model has no server any more.
            RewardModelError: its server refuses to wake up, or ends with the run.
        """
        if self._asked is None:
            return self.__dict__.get("reward") or self._loaded()
        server: Any = ray.get_actor(self._asked)
        try:
            found = ray.get(server.connection.remote(doubted))
        except RayTaskError as error:
            raise error.cause from None  # what the server says, and not where in its process
        if found != self._found:
            found.enter_environment()
            self._found, self.reward = found, self._loaded()
        return self.reward

    def _loaded(self) -> Reward:
        """A new one, its models loaded."""
        with limited_again(self._load_seconds):
            return get_reward(self.name, **self.config.options)

    @noted_call()
    def version(self) -> str:
        """The reward's version, once its models are loaded.

        Raises:
            DoubleflowError: what the reward, or the server of the model that it asks, says.
            RewardRaised: any other error of loading.
        """
        try:
            self.reward = self._current_reward()
        except DoubleflowError:
            raise
        except Exception as error:
            raise RewardRaised(said(error)) from error
        return str(self.reward.version)

    @noted_call()
    def score(self, first: int, prompts: Sequence[ScoredPrompt], *shards: np.ndarray) -> RewardResult | RewardError:
        """Score len(prompts) samples, from the `first` of these rollout batches on.

        Args:
            first: see above.
            prompts: of the samples.
            shards: what the reward wants of each of R batches, [B, ...], and then which of their samples are finite,
                [B] each. The others have no score, and the reward is not given them.

        Returns:
            the scores, or the RewardError of a reward that cannot be used so, or whose model is served no more: no
            retry would help.

        Raises:
            RewardRaised: any other error, after which Ray asks again.
        """
        count = len(shards) // 2
        batch, finite = (_joined(parts)[first : first + len(prompts)] for parts in (shards[:count], shards[count:]))
        if finite.all():
            return self._scored(batch, prompts)
        there, size = np.flatnonzero(finite), len(prompts)
        nothing = RewardResult(np.full(size, np.nan, np.float32), {"error": [SAMPLE_NOT_FINITE] * size})
        if not len(there):
            return nothing
        found = self._scored(batch[there], [prompts[index] for index in there])
        return found if isinstance(found, RewardError) else filled_in(nothing, there, found)

    def ends(self, task: str) -> list[CallEnd]:
        """How the processes ended that ended in this call, a try each, see `how_calls_ended`."""
        return how_calls_ended(task)

    def _scored(self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult | RewardError:
        """See `score`."""
        try:
            self.reward = self._current_reward()
            result = self._timed(batch, prompts)
            for _ in range(self.config.retries):
                if not (calls := self._worth_asking_again(result)):
                    break
                for missing in calls:
                    again = self._timed_or_missing(batch[missing], [prompts[index] for index in missing])
                    result = filled_in(result, missing, again)
        except RewardError as error:
            return error
        except Exception as error:
            time.sleep(self.config.retry_wait_s)
            raise RewardRaised(said(error)) from error
        return replace(result, version=str(self.reward.version))

    def _worth_asking_again(self, result: RewardResult) -> list[np.ndarray]:
        """Indices of samples without a score, of each further call: all of them where another model is asked by now,
        else those that raised, once `retry_wait_s` are over. Not of a call that a process has died of: the others'
        scores would go with the next one."""
        missing = np.flatnonzero(np.isnan(result.scores))
        if len(missing) and self._is_another_asked():
            return [missing]
        if not result.raised or has_lost_a_process():
            return []
        time.sleep(self.config.retry_wait_s)
        return [np.array(together) for together in result.raised]

    def _is_another_asked(self) -> bool:
        """Has the model that gave no scores died, and is another in its place by now? One that lives has answered."""
        before = self._found
        if before is None:
            return False
        self._current_reward(before)
        return self._found != before

    def _timed_or_missing(self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """As `_timed`; of samples beside which others have a score, what is raised is the error, and not a batch's."""
        begun = time.perf_counter()
        try:
            return self._timed(batch, prompts)
        except RewardError:
            raise
        except Exception as error:
            reason = said(error)
            nothing, seconds = np.full(len(prompts), np.nan), time.perf_counter() - begun
            together = tuple(range(len(prompts)))
            return RewardResult(nothing, {"error": [reason] * len(prompts)}, seconds, raised=(together,))

    def _timed(self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """The scores and their seconds; a process of which it takes longer than `timeout_s` ends. A judge is asked for
        less than that, so that the scores of what it has answered are not lost."""
        begun = time.perf_counter()
        # Its own thread ends the process also where Python code cannot: Ray starts another and repeats the call.
        faulthandler.dump_traceback_later(self.config.timeout_s, exit=True, file=STANDARD_ERROR)
        try:
            with asked_within(self.config.timeout_s):
                result = self.reward(self._asked_about(batch), prompts)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return replace(result, seconds=time.perf_counter() - begun)

    def _asked_about(self, batch: np.ndarray) -> np.ndarray:
        """The batch; of videos every `frame_interval`-th frame, for a reward of pictures."""
        is_of_frames = self.reward.wants == "images" and batch.ndim == VIDEOS
        return batch[:, :: self.config.frame_interval] if is_of_frames else batch


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all parts; of one alone no copy."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def said(error: Exception) -> str:
    """Kind and text of an error."""
    return f"{type(error).__name__}: {error}"


def filled_in(result: RewardResult, missing: np.ndarray, again: RewardResult) -> RewardResult:
    """A result with the scores and details of those of its samples that were scored again, and the seconds of both.

    Args:
        missing: the samples' indices, [len(again.scores)].
    """
    scores = result.scores.copy()
    scores[missing] = again.scores
    details: dict[str, list] = {}
    for name in dict.fromkeys([*result.details, *again.details]):
        details[name] = list(result.details.get(name, [None] * len(scores)))
        for index, value in zip(missing, again.details.get(name, [None] * len(missing)), strict=True):
            details[name][index] = value
    raised = [together for together in result.raised if not {*together} <= {*missing.tolist()}]
    raised += [tuple(missing[list(together)].tolist()) for together in again.raised]
    seconds = result.seconds + again.seconds
    return replace(again, scores=scores, details=details, seconds=seconds, raised=tuple(raised))
