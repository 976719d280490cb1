# SPDX-License-Identifier: Apache-2.0
"""The workers of one reward: how its calls are cut, made, awaited and made again, and the table of their answers."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import ceil, inf, isnan
from typing import Any, Literal

import numpy as np
import pandas as pd
import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayTaskError

from models.errors import DoubleflowError
from tasks.actors.actor_group import ActorGroup
from tasks.actors.call_ends import CallEnd
from tasks.actors.loading import ended_for_good, get_loaded, not_loaded
from tasks.actors.machines import MachineLost
from tasks.actors.rank_places import RankPlaces
from tasks.actors.reward_model import RewardModel
from tasks.actors.reward_worker import RewardRaised, RewardWorker, said
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.waiting import get
from tasks.config.reward import RewardFunctionConfig
from tasks.rewards import (
    RewardError,
    RewardResult,
    ScoredPrompt,
    asks_reward_model,
    reward_input,
)
from tasks.rewards.base import one_kind_of_lists

MEASURED = "measured"
"""Of the column that says which samples were, where a share of them is."""
ENDS_SECONDS = 30.0
"""For a worker to be started again and to say how the process before it ended."""


class RewardFailure(DoubleflowError, RuntimeError):
    """Too many scores of a reward are missing; the message holds the reward's own error."""


@dataclass(frozen=True)
class PendingCall:
    """One call of a worker.

    Attributes:
        start: number of the first sample that it scores, among the iteration's.
        size: how many samples it scores.
        answer: what `RewardWorker.score` returns.
        worker, machine: which worker was asked, and the id of the machine from which it had last answered; None of one
            that never had.
        again: ask it again.
        answered: the answer, once somebody waited for it: it is asked for twice where steps are taken early, and may be
            gone by then, with the machine that holds it.
    """

    start: int
    size: int
    answer: ray.ObjectRef
    worker: int
    machine: str | None
    again: "Callable[[], PendingCall]"
    answered: list[Any] = field(default_factory=list, compare=False)


class RewardPool:
    """The workers of one reward. Ray restarts one that dies and repeats its calls, and those that raised an error.

    Args:
        label: the reward's name in the run.
        name: registered name or import path.
        config: its settings.
        model: the run's reward model, where there is one; the reward may ask it or not.
        load_seconds: what a worker that is started again has to load.
        places: those of the trainer's ranks, which its workers go to in turn if they are colocated.
    """

    def __init__(
        self,
        label: str,
        name: str,
        config: RewardFunctionConfig,
        model: RewardModel | None = None,
        load_seconds: float = inf,
        places: RankPlaces | None = None,
    ):
        self.name, self.config, self.load_seconds = label, config, load_seconds
        self.wants = reward_input(name, **config.options)
        asked = model if asks_reward_model(name, **config.options) else None
        self.asks_model = asked is not None
        shared = places if config.is_colocated else None
        self.group = ActorGroup(
            RewardWorker,
            config.num_workers,
            config.num_gpus if shared is None else shared.num_gpus,
            (name, config, None if asked is None else asked.name, load_seconds),
            **({} if asked is None else asked.beside()),
            places=shared,
            num_cpus=config.num_cpus,
            max_restarts=-1,
            max_task_retries=config.retries,
            # A rollout batch that is sampled is not to wait for an earlier one that another worker still samples.
            allow_out_of_order_execution=True,
        )
        self._known = ""
        self._versions = [self._ask_version(worker) for worker in range(len(self.group))]

    def _ask_version(self, worker: int) -> "PendingCall":
        machine = self.group.whereabouts.last(worker)
        return PendingCall(
            0, 0, self.group.actors[worker].version.remote(), worker, machine, partial(self._ask_version, worker)
        )

    def version(self, seconds: float = inf) -> str:
        """The reward's version; waits until its workers have loaded, so many seconds for each.

        Raises:
            NotLoaded: one has not by then.
            RewardFailure: it cannot be loaded.
            RewardError: they differ in it.
        """
        try:
            found = []
            for call in self._versions:
                found.append(self._answer(call, seconds))
        except (RayTaskError, RayActorError) as error:
            if isinstance(error, DoubleflowError):
                raise
            reason = self._reasons([(self._versions[len(found)], error)], loads=True)[0]
            raise RewardFailure(f"reward {self.name!r} could not be loaded: {reason}") from error
        self._known, *others = found
        for other in others:
            self._check_version(other)
        return self._known

    def _check_version(self, version: str) -> None:
        """Raise RewardError where a worker has another version than the first had when the run began."""
        if version and self._known and version != self._known:
            raise RewardError(
                f"reward {self.name!r}: a worker has version {version!r} in place of {self._known!r}, as its code or "
                "its model is another by now, or on that worker's machine: scores of one run must be comparable; bring "
                "that version back, and the same command continues"
            )

    def begin(self, sizes: Sequence[int], share: float = 1.0, together: int = 1) -> "PoolScoring":
        """Get ready to score batches of these sizes: `batch_size` samples a call.

        Args:
            sizes: of the batches of an iteration or a validation, in their order.
            share: of each of them, what is scored.
            together: so many batches share the workers.
        """
        edges = np.cumsum([0, *sizes])
        return PoolScoring(self, edges, call_spans(edges, self.config.batch_size, len(self.group), share, together))

    def call(
        self, worker: int, start: int, first: int, prompts: Sequence[ScoredPrompt], shards: Sequence[Any]
    ) -> PendingCall:
        """Ask a worker for the scores of these samples.

        Args:
            start: number of the first one in the iteration.
            first: its number in the first shard.
            shards: where the worker finds the batches that hold them, and then which of their samples are finite.
        """
        machine = self.group.whereabouts.last(worker)  # while it computes it does not say where it is
        score = self.group.actors[worker].score.options(retry_exceptions=True)
        answer = score.remote(first, prompts, *shards)
        again = partial(self.call, worker, start, first, prompts, shards)
        return PendingCall(start, len(prompts), answer, worker, machine, again)

    def _answer(self, call: PendingCall, seconds: float = inf) -> Any:
        """What a call returns. One that failed because its worker's machine was lost is made again, and is no try.

        Raises:
            MachineLost: with the reward model's server, beside which the worker has to be.
            NotLoaded: the worker is there, and does not answer in so many seconds; or it was started again, and has
                not loaded in `load_seconds`.
        """
        name, actor = f"worker {call.worker} of reward {self.name!r}", self.group.actors[call.worker]
        answered = call.answered
        while not answered:
            try:
                answered += (
                    [get(call.answer)] if seconds == inf else get_loaded([name], [actor], [call.answer], seconds)
                )
                break
            except RayActorError:
                if self.group.whereabouts.lost(call.worker, call.machine) is None:
                    if ended_for_good(actor):
                        raise not_loaded([f"{name}, which was started again"], self.load_seconds) from None
                    raise
            except ActorUnschedulableError as error:  # it is beside the reward model's server, where alone that answers
                raise MachineLost(
                    f"{name}: the machine of the reward model's server is lost, and with it {name}, which is beside "
                    "it; once the cluster has room for both again, the same command continues"
                ) from error
            call = call.again()
        return answered[0]

    def early_scores(self, calls: Sequence[PendingCall], start: int, stop: int) -> np.ndarray | None:
        """Scores [stop - start] of some of an iteration's samples, all of which are measured, once they are there.

        None where a call has none: `collect` of all calls says why. Raises what that raises of a worker's machine.
        """
        covering = [call for call in calls if call.start < stop and call.start + call.size > start]
        try:
            answers = [self._answer(call) for call in covering]
        except (RayTaskError, RayActorError):
            return None
        if any(isinstance(answer, RewardError) for answer in answers):
            return None
        first = start - covering[0].start
        return np.concatenate([answer.scores for answer in answers])[first : first + stop - start]

    def collect(
        self, calls: Sequence[PendingCall], samples: int, max_missing_fraction: float
    ) -> tuple[pd.DataFrame, float]:
        """Wait for the calls of an iteration. Scores that no retry could get are NaN, their error is a detail.

        Args:
            calls: from `submit`.
            samples: of the iteration, measured or not.
            max_missing_fraction: of those that were measured.

        Returns:
            (columns reward/<name> and <name>/<detail> of all samples, busy seconds).

        Raises:
            NotLoaded: a worker that was started again has not loaded in time.
            RewardError: the reward was asked for what it cannot do, or a worker that was started again has another
                version of it.
            RewardFailure: more than `max_missing_fraction` of the scores are missing.
        """
        answers: list[RewardResult] = []
        failed: list[tuple[int, PendingCall, Exception]] = []
        for call in calls:
            try:
                answer = self._answer(call)
            except (RayTaskError, RayActorError) as error:
                failed.append((len(answers), call, error))
                answer = RewardResult(np.full(call.size, np.nan))
            if isinstance(answer, RewardError):
                raise answer
            self._check_version(answer.version)
            answers.append(answer)
        reasons = self._reasons([(call, error) for _, call, error in failed])  # once no call of these is waited for
        for (number, call, _), reason in zip(failed, reasons, strict=True):
            answers[number] = replace(answers[number], details={"error": [reason] * call.size})
        cause = failed[0][2] if failed else None
        self._check_columns(answers)
        table = answers_table(self.name, answers)
        self._check_missing(table, max_missing_fraction, cause)
        if len(table) < samples:
            measured = [call.start + i for call in calls for i in range(call.size)]
            table = with_unmeasured(table, measured, samples, f"{self.name}/{MEASURED}")
        return table, sum(answer.seconds for answer in answers)

    def _check_columns(self, answers: Sequence[RewardResult]) -> None:
        """Raise RewardError for a detail in whose column something else stands."""
        taken = {MEASURED: "which samples were measured"}
        if self.name == "reward":  # as in reward/<name>
            taken["reward"] = "the score"
        for detail, what in taken.items():
            if any(detail in answer.details for answer in answers):
                raise RewardError(
                    f"reward {self.name!r}: its detail {detail!r} stands in the column {self.name}/{detail}, which "
                    f"says {what}: give the detail another name"
                )

    def _reasons(self, failed: Sequence[tuple[PendingCall, Exception]], *, loads: bool = False) -> list[str]:
        """What each of these calls failed of. Of those whose process ended the next one is asked how it did."""
        asked = {
            number: self.group.actors[call.worker].ends.remote(call.answer.task_id().hex())
            for number, (call, error) in enumerate(failed)
            if not isinstance(error, RayTaskError)
        }
        until, reasons = time.monotonic() + ENDS_SECONDS, []
        for number, (_, error) in enumerate(failed):
            if isinstance(error, RayTaskError):
                reasons.append(str(error.cause) if isinstance(error.cause, RewardRaised) else said(error.cause))
                continue
            ends: list[CallEnd] = []
            with suppress(RayActorError, RayTaskError, GetTimeoutError):  # then it is told that it is not known
                ends = get(asked[number], max(0.0, until - time.monotonic()))
            reasons.append(told_ends(self.name, self.config, ends, str(error).strip().splitlines()[-1], loads=loads))
        return reasons

    def _check_missing(self, table: pd.DataFrame, limit: float, cause: Exception | None) -> None:
        missing = table[f"reward/{self.name}"].isna()
        if table.empty or missing.mean() <= limit:
            return
        reason = table.loc[missing, f"{self.name}/error"].dropna().iloc[0]
        raise RewardFailure(
            f"reward {self.name!r} is missing for {missing.sum()} of {len(table)} samples, more than "
            f"reward.max_missing_fraction {limit:g} allows; its error: {reason}"
        ) from cause


def told_ends(
    name: str, config: RewardFunctionConfig, ends: Sequence[CallEnd], of_ray: str, *, loads: bool = False
) -> str:
    """Why a call has no answer: its worker died, hung, or each of them some times; where no end is known, that it is
    one of them.

    Args:
        name: the reward's.
        ends: of the processes that had begun the call.
        of_ray: what Ray says of the last one.
        loads: the call loads the reward, and has no limit of its own.
    """
    limit = f"reward.functions.{name}.timeout_s {config.timeout_s:g} s"
    if not ends:
        late = "" if loads else f", or took longer than {limit},"
        return f"its worker died{late} {_times(config.retries + 1)} ({of_ray})"
    died, hung = [end for end in ends if not end.hung], sum(end.hung for end in ends)
    parts = [f"it hung {_times(hung)}, its worker was ended after {limit}"] if hung else []
    if died:
        last = f"; its last line: {died[-1].said}" if died[-1].said else ""
        parts.insert(0, f"its worker died {_times(len(died))} ({of_ray}{last})")
    return ", and ".join(parts)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@dataclass
class PoolScoring:
    """One reward's calls, each made as soon as the batches that it covers are handed out.

    Attributes:
        pool: whose workers are asked.
        edges: where batches begin, and the end of the last one.
        spans: the samples of each call, from `call_spans`.
        batches: handed out so far.
        calls: made so far.
    """

    pool: RewardPool
    edges: np.ndarray
    spans: Sequence[tuple[int, int]]
    batches: list[PendingBatch] = field(default_factory=list)
    calls: list[PendingCall] = field(default_factory=list)

    def add(self, batch: PendingBatch) -> None:
        """The next batch is handed out; Ray gives it to the calls when it is there."""
        self.batches.append(batch)
        while len(self.calls) < len(self.spans) and self.spans[len(self.calls)][1] <= self.edges[len(self.batches)]:
            self.calls.append(self._next_call())

    def _next_call(self) -> PendingCall:
        number, edges, wants = len(self.calls), self.edges, self.pool.wants
        start, stop = self.spans[number]
        covered = [i for i in range(len(self.batches)) if edges[i] < stop and edges[i + 1] > start]
        shards = [self.batches[i].latents if wants == "latents" else self.batches[i].pictures for i in covered]
        shards += [self.batches[i].finite for i in covered]
        first = int(start - edges[covered[0]])
        prompts = [prompt for i in covered for prompt in self.batches[i].prompts][first : first + stop - start]
        return self.pool.call(number % len(self.pool.group), start, first, prompts, shards)


def call_spans(
    edges: Sequence[int] | np.ndarray,
    size: int | Literal["auto"] | None,
    workers: int,
    share: float = 1.0,
    together: int = 1,
) -> list[tuple[int, int]]:
    """The samples of each call: the first, and the first that is no longer among them.

    Args:
        edges: [batches + 1], where rollout batches begin, and the end of the last one.
        size: `reward.functions.*.batch_size`.
        workers: of the reward, which are called in turn.
        share: of each rollout batch, rounded up; below 1 no call covers two of them.
        together: so many batches share the workers.
    """
    batches = [(int(start), int(start) + ceil(share * (stop - start))) for start, stop in pairwise(edges)]
    if size == "auto":
        return _even_spans(batches, ceil(workers / together), workers)
    if share == 1 and size is not None:
        batches = [(int(edges[0]), int(edges[-1]))]
    spans = []
    for start, stop in batches:
        step = size or max(stop - start, 1)
        spans += [(first, min(first + step, stop)) for first in range(start, stop, step)]
    return spans


def _even_spans(batches: Sequence[tuple[int, int]], parts: int, workers: int) -> list[tuple[int, int]]:
    """Each batch in so many parts that differ by one sample at most. The larger ones are for the workers that had the
    fewest samples until then: the iteration waits for the one that has the most in all."""
    spans, had = list[tuple[int, int]](), [0] * workers
    for start, stop in batches:
        called = [number % workers for number in range(len(spans), len(spans) + min(parts, stop - start))]
        least, more = divmod(stop - start, len(called) or 1)
        larger = sorted(called, key=had.__getitem__)[:more]
        for worker in called:
            part = least + (worker in larger)
            spans.append((start, start + part))
            start, had[worker] = start + part, had[worker] + part
    return spans


def with_unmeasured(table: pd.DataFrame, measured: Sequence[int], samples: int, flag: str) -> pd.DataFrame:
    """A reward's table with a row for each sample of the iteration: NaN, or None, where it was not measured.

    Args:
        table: of the measured samples.
        measured: their numbers.
        samples: of the iteration.
        flag: name of the column that says which were measured.
    """
    whole = table.assign(**{flag: True}).set_index(pd.Index(measured)).reindex(range(samples))
    for column in whole.select_dtypes(object).columns:
        whole[column] = pd.Series([None if is_nan(value) else value for value in whole[column]], dtype=object)
    return whole.assign(**{flag: whole[flag].notna()})


def is_nan(value: object) -> bool:
    """Is it a number, and none?"""
    return isinstance(value, float) and isnan(value)


def answers_table(name: str, answers: Sequence[RewardResult]) -> pd.DataFrame:
    """A row a sample: reward/<name>, and <name>/<detail>, None where an answer lacks it. It can be written, though
    answers may differ in what kind a detail is. Not a table for each answer: a thousand of them took half a second."""
    details: dict[str, list[Any]] = {}
    rows = 0
    for answer in answers:
        for detail in answer.details:
            details.setdefault(detail, [None] * rows)
        for detail, values in details.items():
            values.extend(answer.details.get(detail, [None] * len(answer.scores)))
        rows += len(answer.scores)
    scores = np.concatenate([np.empty(0), *(answer.scores for answer in answers)]).astype(np.float32)
    table = pd.DataFrame({f"reward/{name}": scores} | {f"{name}/{detail}": details[detail] for detail in details})
    for column in table.select_dtypes(object).columns:
        table[column] = pd.Series(one_kind_of_lists(table[column]), dtype=object)
    return table
