# SPDX-License-Identifier: Apache-2.0
"""What shows that a run is no good: its reward stays low, falls, or rises while what nobody trains on falls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tasks.config.reward import GuardConfig, RewardConfig
from tasks.records.held_out_falls import REWARD, Fall, fall, prompt_means
from tasks.rewards import reward_bounds

TRAINED = "critic/rewards/mean"
HACKING_TAG = "doubleflow.reward_hacking"
COLLAPSE_TAG = "doubleflow.reward_collapse"
FLOOR_TAG = "doubleflow.reward_at_floor"
COLLAPSE = "held_out/collapse"
"""Metrics of the held-out reward's own fall are below this name."""
FLOOR_SHARE, FLOOR_QUANTILE = 0.2, 0.95
"""Near the floor: so many of the samples score within this share of the reward's bounds above the lowest score."""
ALIKE = 1e-6
"""Scores that differ by less than this share of their size are one score, rounded in different ways."""


@dataclass(frozen=True)
class Guard:
    """What is watched.

    Attributes:
        metric: its mean in an iteration.
        column: of a validation's table.
        margin: how far it may fall, see `tasks.records.held_out_falls.fall`.
    """

    metric: str
    column: str
    margin: float


def tau(values: Sequence[float]) -> float:
    """Kendall's tau of a series with time: 1 where it only rises, -1 where it only falls; a constant one has 0."""
    if len(set(values)) < 2:
        return 0.0
    from scipy.stats import kendalltau  # here: a second of work, for runs with guards alone

    return float(kendalltau(range(len(values)), values).statistic)


class GuardWatch:
    """Watches for a trained reward that rises while a guard falls: trends in training, verdicts at validations.

    Args:
        config: levels, margins, and how many validations in a row.
        guards: by name.
        history: metric -> its values by iteration, of the iterations before this process.
        validations: iteration -> the table of its validation, of those before this process; asked for once.

    Attributes:
        since: guard -> the first iteration in which it was flagged.
        flagged: those that the newest validation flags.
        suspects: those that it finds fallen, whether or not the validations before did.
        collapsed_since: the first iteration of an unbroken row of validations, up to the newest, in which the held-out
            reward is flagged as fallen far below its highest; None where the newest does not flag it.
        sinking: the newest validation finds it fallen.
    """

    def __init__(
        self,
        config: GuardConfig,
        guards: Mapping[str, Guard],
        history: Callable[[str], Mapping[int, float]],
        validations: Callable[[], Mapping[int, pd.DataFrame]],
    ):
        """Take up where the history ends: guards that were flagged stay so."""
        self.config, self.guards = config, dict(guards)
        metrics = (TRAINED, *(guard.metric for guard in self.guards.values()))
        self.values = {metric: dict(history(metric)) for metric in metrics}
        self.since: dict[str, int] = {}
        self.flagged: set[str] = set()
        for name in self.guards:
            flags = history(f"guard/{name}/flag")
            if any(flags.values()):
                self.since[name] = min(step for step, value in flags.items() if value)
            if flags and flags[max(flags)]:
                self.flagged.add(name)
        self.suspects = set(self.flagged)
        self.collapsed_since = _newest_row(history(f"{COLLAPSE}/flag"))
        self.sinking = self.collapsed_since is not None
        self._validations = validations
        self._means: dict[int, pd.DataFrame] | None = None

    def observe(self, iteration: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take in an iteration's metrics; their trends over the last `window` iterations, which are no verdict.

        Returns:
            guard/<name>/tau of each guard that has a full window, and guard/reward/tau.
        """
        for metric, values in self.values.items():
            if metric in metrics:
                values[iteration] = metrics[metric]
        found: dict[str, float] = {}
        for name, guard in self.guards.items():
            both = [step for step in self.values[TRAINED] if step <= iteration and step in self.values[guard.metric]]
            steps = sorted(both)[-self.config.window :]
            if len(steps) == self.config.window:
                found["guard/reward/tau"] = tau([self.values[TRAINED][step] for step in steps])
                found[f"guard/{name}/tau"] = tau([self.values[guard.metric][step] for step in steps])
        return found

    def judge(self, iteration: int, table: pd.DataFrame) -> dict[str, float]:
        """Take in an iteration's validation, and give each guard its verdict.

        A guard is flagged where this validation and the `validations` - 1 before it all find it fallen while the
        trained reward rose, at level `p_value` / (number of guards): see `tasks.records.held_out_falls.fall`.

        Args:
            iteration: later than all before.
            table: a row a picture, with uid, reward and the guards' columns.

        Returns:
            guard/<name>/flag (0 or 1) of each guard that has an earlier validation, and guard/<name>/fall.
        """
        columns = [guard.column for guard in self.guards.values()]
        if self._means is None:
            self._means = {step: prompt_means(before, columns) for step, before in self._validations().items()}
        means = {step: before for step, before in self._means.items() if step < iteration}
        self._means = means | {iteration: prompt_means(table, columns)}
        found: dict[str, float] = {}
        self.flagged, self.suspects = set(), set()
        for name, guard in self.guards.items():
            falls = self._falls(guard.column, self.config.p_value / len(self.guards), guard.margin)
            if falls:
                found |= self._verdict(name, falls, iteration)
        falls = self._falls(REWARD, self.config.p_value, self.config.collapse_margin)
        if not falls:  # nothing before can be compared, so that a row of falls ends here
            self.collapsed_since, self.sinking = None, False
            return found
        return found | self._collapse(falls, iteration)

    def _falls(self, column: str, level: float, margin: float) -> list[Fall]:
        """At the last `validations` validations, or as many as have one earlier; none where the last has none."""
        means = self._means or {}
        last = sorted(means)[-self.config.validations :]
        found = [fall(means, step, column, level, margin) for step in last]
        return [] if found[-1] is None else [one for one in found if one is not None]

    def _collapse(self, falls: Sequence[Fall], iteration: int) -> dict[str, float]:
        self.sinking = falls[-1].suspicious
        if len(falls) < self.config.validations or not all(one.suspicious for one in falls):
            self.collapsed_since = None
        elif self.collapsed_since is None:
            self.collapsed_since = iteration
        found = {f"{COLLAPSE}/flag": float(self.collapsed_since is not None)}
        return found | ({f"{COLLAPSE}/fall": falls[-1].spreads} if np.isfinite(falls[-1].spreads) else {})

    def _verdict(self, name: str, falls: Sequence[Fall], iteration: int) -> dict[str, float]:
        if falls[-1].suspicious:
            self.suspects.add(name)
        if len(falls) == self.config.validations and all(one.suspicious for one in falls):
            self.flagged.add(name)
            self.since.setdefault(name, iteration)
        found = {f"guard/{name}/flag": float(name in self.flagged)}
        return found | ({f"guard/{name}/fall": falls[-1].spreads} if np.isfinite(falls[-1].spreads) else {})

    @property
    def doubtful_from(self) -> int:
        """The first iteration after the last validation that has no part in a flag of the newest one."""
        before = sorted(self._means or {})[: -self.config.validations]
        return before[-1] + 1 if before else 0

    def sentence(self, now: bool = False) -> str | None:
        """What has been flagged so far and since which iteration, for a tag and a warning; None where nothing has.

        Args:
            now: of those alone that the newest validation flags.
        """
        told = {name: step for name, step in self.since.items() if not now or name in self.flagged}
        if not told:
            return None
        return "the held-out reward rises while " + ", ".join(
            f"{name} falls (since iteration {step})" for name, step in told.items()
        )

    @property
    def is_clean(self) -> bool:
        """Does the newest validation find nothing fallen?"""
        return not self.suspects and not self.sinking

    def collapse(self) -> str | None:
        """What the newest validation says of the held-out reward itself, for a tag and a warning; None where it has not
        fallen far."""
        if self.collapsed_since is None:
            return None
        return f"the held-out reward has fallen far below its highest (since iteration {self.collapsed_since})"


def _newest_row(flags: Mapping[int, float]) -> int | None:
    """The first step of the unbroken row of true values that ends with the newest; None where that is not true."""
    first = None
    for step in sorted(flags, reverse=True):
        if not flags[step]:
            break
        first = step
    return first


def near_floor(scores: np.ndarray, weight: float, bounds: tuple[float, float] | None) -> bool:
    """Do the scores [B] of one reward tell the samples apart in no way, or almost none above the worst there can be?

    Args:
        scores: NaN where missing; those are left out.
        weight: a reward of negative weight is at its worst at its upper bound.
        bounds: the lowest and the highest score; without them only scores that are all alike count.
    """
    present = scores[np.isfinite(scores)].astype(np.float64)
    if len(present) < 2:
        return False
    if np.ptp(present) <= ALIKE * np.abs(present).max():
        return True
    if bounds is None:
        return False
    worst, best = bounds if weight > 0 else bounds[::-1]
    return bool(np.quantile((present - worst) / (best - worst), FLOOR_QUANTILE) <= FLOOR_SHARE)


class FloorWatch:
    """Watches the trained rewards of a run's first iterations for scores that never leave the floor.

    Args:
        config: the rewards, and `guards.floor_iterations`.
        iterations: that the run is to have; a shorter run is watched throughout.
        history: metric -> its values by iteration, of the iterations before this process.
    """

    def __init__(self, config: RewardConfig, iterations: int, history: Callable[[str], Mapping[int, float]]):
        """Take up where the history ends."""
        self.iterations = min(config.guards.floor_iterations, iterations)
        self.rewards = {
            label: (entry.share, reward_bounds(name, **entry.options))
            for label, (name, entry) in config.named().items()
            if entry.share
        }
        self.seen = {label: dict(history(self._metric(label))) for label in self.rewards if self.iterations}

    def metrics(self, iteration: int, scores: Mapping[str, np.ndarray]) -> dict[str, float]:
        """reward/<name>/at_floor, 1 or 0, of a watched iteration's scores: reward name -> [B]."""
        if iteration > self.iterations:
            return {}
        found = {label: near_floor(scores[label], *settings) for label, settings in self.rewards.items()}
        return {self._metric(label): float(at_floor) for label, at_floor in found.items()}

    def observe(self, iteration: int, metrics: Mapping[str, float]) -> str | None:
        """Take in an iteration's metrics; after the last that is watched what a warning should say, else None."""
        for label, values in self.seen.items():
            if self._metric(label) in metrics:
                values[iteration] = metrics[self._metric(label)]
        if iteration != self.iterations:
            return None
        stuck = [label for label, values in self.seen.items() if all(values.get(i + 1) for i in range(iteration))]
        if not stuck:
            return None
        return (
            f"the scores of {', '.join(stuck)} were all near the lowest there can be, or all alike, in each of the "
            f"first {iteration} iterations"
        )

    def _metric(self, label: str) -> str:
        return f"reward/{label}/at_floor"
