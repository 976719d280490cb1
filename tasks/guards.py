"""Reward hacking shows: the trained reward rises while something that nobody trains on falls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import kendalltau

from tasks.config import GuardConfig

TRAINED = "critic/rewards/mean"
HACKING_TAG = "doubleflow.reward_hacking"


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
