# SPDX-License-Identifier: Apache-2.0
"""What shows that a reward is no good: it never leaves its floor, or it rises while what nobody trains on falls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.config.reward import GuardConfig, RewardConfig
from tasks.rewards import reward_bounds

TRAINED = "critic/rewards/mean"
HACKING_TAG = "doubleflow.reward_hacking"
FLOOR_TAG = "doubleflow.reward_at_floor"
FLOOR_SHARE, FLOOR_QUANTILE = 0.2, 0.95
"""Near the floor: so many of the samples score within this share of the reward's bounds above the lowest score."""
ALIKE = 1e-6
"""Scores that differ by less than this share of their size are one score, rounded in different ways."""


@dataclass(frozen=True)
class Trend:
    """Mann-Kendall test of a series: Kendall's tau of its values with time, and one-sided p-values of either trend."""

    tau: float
    p_rise: float
    p_fall: float


def trend(values: Sequence[float]) -> Trend:
    """The trend of a series; a constant one has none (tau 0, p 1).

    The p-values hold for independent values. Means of successive iterations are nearly so, as their prompts and noise
    are new draws; a policy that wanders without aim is not, and makes small p-values more frequent.
    """
    if len(set(values)) < 2:
        return Trend(0.0, 1.0, 1.0)
    from scipy.stats import kendalltau  # here: a second of work, for runs with guards alone

    time = range(len(values))
    rise, fall = (kendalltau(time, values, alternative=side) for side in ("greater", "less"))
    return Trend(float(rise.statistic), float(rise.pvalue), float(fall.pvalue))


class GuardWatch:
    """Tests the last iterations for a trained reward that rises while a guard falls.

    Args:
        config: window and level.
        guards: guard's name -> the metric that holds its mean in an iteration.
        history: metric -> its values by iteration, of the iterations before this process.
    """

    def __init__(self, config: GuardConfig, guards: Mapping[str, str], history: Callable[[str], Mapping[int, float]]):
        """Take up where the history ends: guards that were flagged stay so."""
        self.config, self.guards = config, dict(guards)
        self.values = {metric: dict(history(metric)) for metric in (TRAINED, *self.guards.values())}
        self.since: dict[str, int] = {}
        for guard in self.guards:
            flagged = [step for step, value in history(f"guard/{guard}/flag").items() if value]
            if flagged:
                self.since[guard] = min(flagged)

    def observe(self, iteration: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take in an iteration's metrics; the guards' own metrics of it.

        A guard is flagged when, over the last `window` iterations that have both, the trained reward rises at level
        `p_value` and the guard falls at level `p_value` / (number of guards).

        Returns:
            guard/<name>/tau and guard/<name>/flag (0 or 1) of each guard that has a full window, and
            guard/reward/tau.
        """
        for metric, values in self.values.items():
            if metric in metrics:
                values[iteration] = metrics[metric]
        found: dict[str, float] = {}
        for guard, metric in self.guards.items():
            both = [step for step in self.values[TRAINED] if step <= iteration and step in self.values[metric]]
            steps = sorted(both)[-self.config.window :]
            if len(steps) < self.config.window:
                continue
            reward, watched = (trend([self.values[name][step] for step in steps]) for name in (TRAINED, metric))
            falls = watched.p_fall < self.config.p_value / len(self.guards)
            flag = reward.p_rise < self.config.p_value and falls
            if flag:
                self.since.setdefault(guard, iteration)
            found |= {"guard/reward/tau": reward.tau, f"guard/{guard}/tau": watched.tau}
            found[f"guard/{guard}/flag"] = float(flag)
        return found

    def sentence(self) -> str | None:
        """What has been flagged so far and since which iteration, for a tag and a warning; None where nothing has."""
        if not self.since:
            return None
        return "the reward rises while " + ", ".join(
            f"{guard} falls (since iteration {step})" for guard, step in self.since.items()
        )


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
