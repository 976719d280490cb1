# SPDX-License-Identifier: Apache-2.0
"""Has a guard fallen while the trained reward rose, or that reward itself? Paired tests over the held-out prompts of a
run's validations."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

REWARD = "reward"
"""Column of the trained reward in a validation's table."""


@dataclass(frozen=True)
class Fall:
    """What one validation says of one guard, or of the trained reward.

    Attributes:
        reference: the earlier validation that it is compared with, at which the guard was highest.
        mean: of the guard there minus now, over prompts.
        spreads: the same in standard deviations of the guard among the prompts of the first validation; NaN where that
            is zero.
        suspicious: the fall is larger than the margin, and, of a guard, the trained reward has risen.
    """

    reference: int
    mean: float
    spreads: float
    suspicious: bool


def prompt_means(table: pd.DataFrame, columns: Collection[str]) -> pd.DataFrame:
    """A validation's table to a row a prompt: means over its pictures of the reward and of the columns that it has, but
    for one that has no value at all, as of a reward that answered nothing."""
    known = [name for name in columns if name in table and table[name].notna().any()]
    return table.groupby("uid")[[REWARD, *known]].mean()


def p_above(differences: np.ndarray, margin: float) -> float:
    """One-sided p-value of Student's t-test that the mean of independent differences [N] is at most `margin`.

    1 for fewer than two; for differences that are all equal 0 or 1, whichever side of the margin they are on.
    """
    if len(differences) < 2:
        return 1.0
    above, spread = float(np.mean(differences)) - margin, float(np.std(differences, ddof=1))
    if spread == 0:
        return float(above <= 0)
    from scipy.stats import t  # here: a second of work, for runs with guards alone

    return float(t.sf(above / spread * np.sqrt(len(differences)), len(differences) - 1))


def fall(means: Mapping[int, pd.DataFrame], now: int, column: str, level: float, margin: float) -> Fall | None:
    """The fall of a guard, or of the trained reward, from the earlier validation at which it was highest; None where
    none is earlier.

    All validations draw the same prompts from the same noise, so each prompt is compared with itself. The level is
    shared among the earlier validations, each of which could have been the highest.

    Args:
        means: iteration -> `prompt_means` of its validation.
        now: which of them is judged.
        column: of the guard; `REWARD` asks for no rise beside its fall.
        level: of both tests.
        margin: in standard deviations of the guard among the prompts of the first validation: a smaller fall is none.
    """
    earlier = [step for step, table in means.items() if step < now and column in table]
    if not earlier or column not in means[now]:
        return None
    first, present = means[min(earlier)], means[now]
    reference = max(earlier, key=lambda step: (means[step][column].mean(), step))
    falls = (means[reference][column] - present[column]).dropna()
    spread = float(first[column].std())
    least = margin * spread if np.isfinite(spread) else 0.0
    mean = float(falls.mean())
    gains = (present[REWARD] - means[reference][REWARD]).dropna()
    risen = column == REWARD or (mean > least and p_above(gains.to_numpy(np.float64), 0.0) < level / len(earlier))
    # Most validations find no fall, and those import no statistics.
    fallen = mean > least and risen and p_above(falls.to_numpy(np.float64), least) < level / len(earlier)
    return Fall(reference, mean, mean / spread if spread > 0 else float("nan"), fallen)
