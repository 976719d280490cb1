# SPDX-License-Identifier: Apache-2.0
"""The best and the worst pictures of a measurement, with what names each of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
from PIL import Image

from tasks.records.comparison import score_columns
from tasks.report.thumbnails import of_sample

MOST, MOST_MISSING = 6, 3
"""Pictures of each end, and of those without a reward."""
LONGEST_TEXT = 400
KEY = ("seed", "iteration", "uid", "sample_index")
NO_DETAILS = ("prompt", "advantage", "policy_version", "image", "reward", "set", "steps", "guidance", *KEY)


@dataclass(frozen=True)
class Sample:
    """One picture.

    Attributes:
        end: "best", "worst", or "missing" where it has no reward.
        rewards: the trained reward, then each by itself; None where it is missing.
        details: what the rewards said beside their scores.
        noise_key: what its noise is drawn by.
        thumbnail: a data URI.
    """

    end: str
    prompt: str
    rewards: dict[str, float | None]
    details: dict[str, str]
    noise_key: dict[str, Any]
    thumbnail: str

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def extremes(table: pd.DataFrame, picture: Callable[[int], Image.Image]) -> list[Sample]:
    """The best pictures from the best on, the worst from the worst on, and a few that have no reward.

    Args:
        table: a row a picture with `prompt`, `reward`, `reward/<name>` and the columns of `KEY`; none is at both ends.
        picture: the picture of a row, by its place in the table.
    """
    rows = table.reset_index(drop=True)
    order = rows["reward"].dropna().sort_values(ascending=False, kind="stable").index
    count = min(MOST, math.ceil(len(order) / 2))
    ends = [("best", row) for row in order[:count]]
    ends += [("worst", row) for row in order[count:][::-1][:MOST]]
    ends += [("missing", row) for row in rows.index[rows["reward"].isna()][:MOST_MISSING]]
    scores = score_columns(rows)
    return [_sample(end, rows.loc[row], scores, of_sample(picture(int(row)))) for end, row in ends]


def _sample(end: str, row: pd.Series, scores: Sequence[str], thumbnail: str) -> Sample:
    names = [str(name) for name in row.index]
    rewards = {name: _score(row[name]) for name in scores}
    # A picture's statistics are no one's opinion of it.
    others = [n for n in names if n not in rewards and n not in NO_DETAILS and not n.startswith("image/")]
    details = {name: _text(row[name]) for name in others}
    key = {name: row[name].item() if hasattr(row[name], "item") else row[name] for name in KEY if name in names}
    return Sample(end, _text(row["prompt"]), rewards, details, key, thumbnail)


def _score(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _text(value: Any) -> str:
    said = f"{value:.4g}" if isinstance(value, float) else str(value)
    return said if len(said) <= LONGEST_TEXT else f"{said[:LONGEST_TEXT]} ..."
