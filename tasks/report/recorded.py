# SPDX-License-Identifier: Apache-2.0
"""What a page needs of one run, read from its record in MLflow."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tasks.records.comparison import Interval, mean_interval, score_columns
from tasks.records.history import RunHistory
from tasks.records.lineage import Start
from tasks.records.model_registry import TABLE
from tasks.records.tracking import STEP_MARK
from tasks.report.charts import Band, spread
from tasks.report.samples import Sample, extremes
from tasks.report.thumbnails import of_grid
from tasks.stages.validation import VALIDATION_ITERATION, VALIDATION_SEED
from tasks.system.late_mlflow import Run

CONFIDENCE = 0.95
RESAMPLES = 999
BAND_POINTS = 40
"""Most points of a curve that get a band; of a longer curve they are spread evenly."""
FRAMES = 24
"""Most grids of a kind, likewise."""
EXTREMES, OVERRIDES = "extremes", "overrides.json"
PLACEHOLDERS = {"set": "test", "steps": 0, "guidance": 0.0, "seed": 0}


@dataclass
class Recorded:
    """One run, or a measurement of a validation sweep.

    Attributes:
        run: MLflow's record: name, state, times, tags, parameters, data sets.
        config: what it ran with.
        metrics: metric -> step -> value.
        held_out: step -> rewards of the held-out pictures, with the columns of `PAIR`.
        sampled: step -> rewards of the training pictures, a row a prompt.
        grids: "validation" and "samples" -> step -> a small copy.
        samples: "held-out" and "training" -> (step, the best and the worst pictures).
        overrides: field -> [the recipe's value, the run's]; None where that was not recorded.
        environment: packages and machines of the last start.
        intervals: what was resampled so far, (kind, column, step) -> the mean over prompts.
    """

    run: Run
    config: dict[str, Any]
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    held_out: dict[int, pd.DataFrame] = field(default_factory=dict)
    sampled: dict[int, pd.DataFrame] = field(default_factory=dict)
    grids: dict[str, dict[int, str]] = field(default_factory=dict)
    samples: dict[str, tuple[int, list[Sample]]] = field(default_factory=dict)
    overrides: dict[str, list[str]] | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    intervals: dict[tuple[str, str, int], Interval | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.run.info.run_name)

    @property
    def weights(self) -> dict[str, float]:
        """Reward -> its share of the trained reward; 0 is a guard."""
        functions = self.config["reward"]["functions"]
        shares = {name: 1.0 if entry["weight"] is None else entry["weight"] for name, entry in functions.items()}
        return {name: 0.0 if functions[name].get("guard") else share for name, share in shares.items()}

    @property
    def only_trained(self) -> str | None:
        """The reward that by itself, with weight 1, is the trained one; None where several are, or it is weighted."""
        trained = [name for name, weight in self.weights.items() if weight]
        return trained[0] if len(trained) == 1 and self.weights[trained[0]] == 1 else None

    def bands(self, kind: str, column: str) -> tuple[dict[int, float], Band]:
        """Means over prompts of a reward's column and their intervals, of "held_out" or "sampled", for some steps."""
        tables: dict[int, pd.DataFrame] = getattr(self, kind)
        steps = [step for step in spread(tables, BAND_POINTS) if column in tables[step]]
        found = {step: self._interval(kind, column, step, tables[step]) for step in steps}
        there = {step: interval for step, interval in found.items() if interval is not None}
        return {s: i.mean for s, i in there.items()}, {s: (i.low, i.high) for s, i in there.items()}

    def _interval(self, kind: str, column: str, step: int, table: pd.DataFrame) -> Interval | None:
        key = (kind, column, step)
        if key not in self.intervals:
            prompts = table.groupby("uid")[column].mean().dropna().to_numpy(float)
            self.intervals[key] = mean_interval(prompts, CONFIDENCE, RESAMPLES) if len(prompts) > 1 else None
        return self.intervals[key]


def reward_columns(runs: Sequence[Recorded]) -> dict[str, str]:
    """Columns of the trained reward and of every reward by itself, each in words, for a page of these runs; one that
    is the trained reward of all of them is named once."""
    alone = {recorded.only_trained for recorded in runs}
    trained = alone.pop() if len(alone) == 1 else None
    weights: dict[str, list[float]] = {}
    for recorded in runs:
        for name, weight in recorded.weights.items():
            weights.setdefault(name, []).append(weight)
    apart = {
        f"reward/{name}": name if any(of_runs) else f"{name} (guard)"
        for name, of_runs in weights.items()
        if name != trained
    }
    return {"reward": "reward" if trained is None else f"reward ({trained})"} | apart


def read(history: RunHistory, grids: Iterable[str] = ("validation",)) -> Recorded:
    """Everything a page needs of one run.

    Args:
        grids: which pictures on MLflow's slider, "validation" and "samples".
    """
    there = {item.path for item in history.client.list_artifacts(history.run_id)}
    recorded = Recorded(history.run, history.config(), history.metrics())
    if TABLE in there:
        recorded.held_out = {max(recorded.metrics[STEP_MARK]): history.parquet(TABLE)}
    else:
        recorded.held_out = {
            step: history.table("validation", step).assign(**PLACEHOLDERS)
            for step in spread(history.steps("validation"), BAND_POINTS)
        }
    steps = spread(history.steps("samples"), BAND_POINTS)
    recorded.sampled = {step: by_prompt(history.table("samples", step)) for step in steps}
    pictures = history.pictures()
    for kind in grids:
        files = pictures.get(kind, {})
        validated = recorded.metrics.get("val/reward/mean", {})
        chosen = spread(files, FRAMES, {*files, *validated} if kind == "validation" else files)
        recorded.grids[kind] = {step: of_grid(history.image(files[step])) for step in chosen}
    recorded.samples = _samples(history)
    if OVERRIDES in there:
        recorded.overrides = json.loads(history.content(OVERRIDES))
    starts = [Start.parsed(Path(item.path).name) for item in history.client.list_artifacts(history.run_id, "lineage")]
    if newest := max(filter(None, starts), default=None):
        recorded.environment = json.loads(history.content(f"lineage/{newest}/environment.json"))
    return recorded


def by_prompt(samples: pd.DataFrame) -> pd.DataFrame:
    """Mean rewards of the samples, a row a prompt: columns uid, reward and reward/<name>, as far as they are there."""
    columns = score_columns(samples)
    if "uid" not in samples or not columns:  # of an offline run, whose pairs have no rewards
        return pd.DataFrame({"uid": []})
    return samples.groupby("uid", as_index=False)[columns].mean()


def validation_samples(table: pd.DataFrame) -> pd.DataFrame:
    """The table of a run's own validation, with the rest of its pictures' noise keys."""
    return table.assign(seed=VALIDATION_SEED, iteration=VALIDATION_ITERATION)


def as_json(step: int, samples: Iterable[Sample]) -> dict[str, Any]:
    """The best and the worst of a validation, for MLflow."""
    return {"iteration": step, "samples": [sample.as_dict() for sample in samples]}


def _samples(history: RunHistory) -> dict[str, tuple[int, list[Sample]]]:
    """The newest of what is kept."""
    found: dict[str, tuple[int, list[Sample]]] = {}
    validated = history.steps(EXTREMES)
    if validated:
        last = validated[-1]
        rows: list[Mapping[str, Any]] = json.loads(history.content(f"{EXTREMES}/{last:06d}.json"))["samples"]
        found["held-out"] = last, [Sample(**row) for row in rows]
    albums = history.steps("pictures")
    if albums:
        table = history.table("samples", albums[-1])
        if "image" in table:  # pairs are read, not sampled, and have none
            kept = table[table["image"].notna()].reset_index(drop=True)
            found["training"] = albums[-1], extremes(kept, lambda row: history.image(kept["image"][row]))
    return found
