# SPDX-License-Identifier: Apache-2.0
"""Is one set of weights better than another? Paired by prompt and noise, with a bootstrap interval."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from models.errors import DoubleflowError
from tasks.records.held_out_falls import REWARD

PAIR = ("set", "steps", "guidance", "seed", "uid", "sample_index")
"""Columns that name a picture: two sets of weights draw it from the same prompt and the same noise."""


SAME = 1e-9
"""Differences of a value, relative to it, that rounding makes."""


class ComparisonError(DoubleflowError, ValueError):
    """Two measurements cannot be compared."""


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """As "+0.1200 [+0.0900, +0.1500]"."""
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def score_columns(table: pd.DataFrame) -> list[str]:
    """Columns of the trained reward and of every reward by itself.

    Where a reward is called `reward`, as `flows.migrate` calls one, its details are below the same name: those that are
    no numbers are left out.
    """
    numbers = table.select_dtypes("number").columns
    return [str(name) for name in numbers if name == REWARD or str(name).startswith(f"{REWARD}/")]


def mean_interval(values: np.ndarray, confidence: float, resamples: int = 9999) -> Interval:
    """The mean of independent values [N], N > 1, and its BCa bootstrap interval (Efron 1987); seeded.

    Values that are all equal, as far as they are exact, have an interval of no width.
    """
    mean = float(np.mean(values))
    if np.ptp(values) <= SAME * np.abs(values).max():  # with rounding alone for a spread the bootstrap gives NaN
        return Interval(mean, mean, mean)
    from scipy.stats import bootstrap  # here: a second of work, once there is something to compare

    result = bootstrap((values,), np.mean, confidence_level=confidence, n_resamples=resamples, rng=0)
    return Interval(mean, float(result.confidence_interval.low), float(result.confidence_interval.high))


def paired_gain(
    table: pd.DataFrame, reference: pd.DataFrame, column: str, confidence: float, resamples: int = 9999
) -> Interval:
    """Mean of `column` in `table` minus in `reference`, over the pictures that both have a value for.

    Pictures of one prompt are not independent, so the prompts are what is resampled: each counts with the mean
    difference of its pictures.

    Args:
        table, reference: measurements with the columns of `PAIR`, which name each picture once.

    Raises:
        ComparisonError: fewer than two prompts can be paired.
    """
    pairs = table.merge(reference, on=list(PAIR), suffixes=("", "/reference"), validate="one_to_one")
    differences = (pairs[column] - pairs[f"{column}/reference"]).groupby([pairs["set"], pairs["uid"]]).mean().dropna()
    if len(differences) < 2:
        raise ComparisonError(
            f"only {len(differences)} prompts have a {column} in both measurements: at least 2 are needed"
        )
    return mean_interval(differences.to_numpy(np.float64), confidence, resamples)
