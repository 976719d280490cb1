# SPDX-License-Identifier: Apache-2.0
"""The parts of a page as plain values: what a run reached, curves, guards, cost, config and lineage."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from tasks.records.comparison import ComparisonError, Interval, paired_gain
from tasks.records.guards import COLLAPSE_TAG, FLOOR_TAG, HACKING_TAG
from tasks.records.headline import UNMOVED_TAG
from tasks.records.lineage import TAG, Start
from tasks.records.metrics import BEHIND, INSIDE
from tasks.records.model_registry import REGRESSION
from tasks.records.tracking import STEP_MARK, as_parameters
from tasks.report.charts import Chart, Series, finite, line_chart, number, sparkline
from tasks.report.recorded import CONFIDENCE, RESAMPLES, Recorded, reward_columns
from tasks.system.late_mlflow import mlflow_tags

HELD_OUT = "val/reward/mean"
SIZE = (420, 190)
RECENT = 20
"""Iterations that a present pace is the median of."""
POLICY = {
    "clip share": ("actor/pg_clipfrac",),
    "ratio, distance from 1": ("actor/ratio_deviation/mean",),
    "KL to the old policy": ("actor/ppo_kl",),
    "KL to the base model": ("actor/kl_loss",),
    "pairs in the right order": ("actor/implicit_acc",),
    "policy loss": ("actor/pg_loss",),
    "gradient norm": ("actor/grad_norm",),
    "reward's deviation in a group": ("critic/rewards/std_mean",),
    "groups that score alike": ("critic/rewards/zero_std_ratio",),
    "diversity": ("train/image/diversity/mean", "val/image/diversity/mean"),
    "learning rate": ("actor/lr",),
    "seconds of an iteration": ("timing_s/step",),
}
"""Curves beside the rewards', as far as a run has their metrics."""
WORDS = {"val": "held-out", "train": "training"}


@dataclass(frozen=True)
class Tile:
    """A number to see first, and what is to be said of it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Trace:
    """A metric in a row: its first and last value, its curve."""

    name: str
    first: str
    last: str
    curve: Markup


def last_of(recorded: Recorded, metric: str) -> float:
    """A metric's newest value; NaN where there is none."""
    points = finite(recorded.metrics.get(metric, {}))
    return points[max(points)] if points else math.nan


def progress(recorded: Recorded) -> tuple[int, int]:
    """(iterations that are recorded, iterations that there are to be)."""
    done = max(recorded.metrics.get(STEP_MARK, {0: 0.0}))
    return done, max(int(recorded.config["trainer"]["total_training_steps"]), done)


def pace(recorded: Recorded) -> float:
    """Seconds of an iteration, of late; NaN where none is recorded."""
    seconds = list(finite(recorded.metrics.get("timing_s/step", {})).values())[-RECENT:]
    return statistics.median(seconds) if seconds else math.nan


def gain(recorded: Recorded) -> Interval | None:
    """The last validation's reward minus the first's, paired by prompt and noise; None without two of them."""
    if len(recorded.held_out) < 2:
        return None
    first, last = min(recorded.held_out), max(recorded.held_out)
    key = ("gain", str(first), last)
    if key not in recorded.intervals:
        try:
            tables = recorded.held_out[last], recorded.held_out[first]
            recorded.intervals[key] = paired_gain(*tables, "reward", CONFIDENCE, RESAMPLES)
        except ComparisonError:  # fewer than two prompts have a reward in both
            recorded.intervals[key] = None
    return recorded.intervals[key]


def tiles(recorded: Recorded) -> list[Tile]:
    """The numbers of the first screen."""
    held_out, trained = (finite(recorded.metrics.get(n, {})) for n in (HELD_OUT, "critic/rewards/mean"))
    found = []
    if HELD_OUT in recorded.metrics or recorded.held_out:
        found.append(Tile("held-out reward", _before_now(held_out), _gained(recorded)))
    if trained:
        found.append(Tile("training reward", _before_now(trained), "first iteration, last"))
    images, seconds = last_of(recorded, "perf/total_num_images"), pace(recorded)
    if math.isfinite(seconds):
        found.append(Tile("an iteration", duration(seconds), f"{images / seconds:.3g} images a second"))
    hours, gpu_hours = (last_of(recorded, f"cost/{name}") for name in ("hours", "gpu_hours"))
    if math.isfinite(hours):
        used = f"{_three_digits(gpu_hours)} GPU-hours" if gpu_hours else "no GPU"
        sampled = f"{last_of(recorded, 'cost/images'):,.0f} images"
        found.append(Tile("cost so far", duration(3600 * hours), f"{used}, {sampled}"))
    return found


def cost(recorded: Recorded) -> dict[str, str]:
    """Cost, and what it bought."""
    held_out = finite(recorded.metrics.get(HELD_OUT, {}))
    gained = held_out[max(held_out)] - held_out[min(held_out)] if len(held_out) > 1 else None
    hours, gpu_hours, images = (last_of(recorded, f"cost/{name}") for name in ("hours", "gpu_hours", "images"))
    orchestration = 100 * last_of(recorded, "perf/orchestration_share")

    def per_gain(spent: float, unit: str) -> str:
        if gained is None:
            return "not measured"
        return f"{number(spent / gained)} {unit}" if gained > 0 and math.isfinite(spent) else "no gain"

    return {
        "iterations": str(progress(recorded)[0]),
        "held-out reward": number(held_out[max(held_out)]) if held_out else "not measured",
        "held-out reward gained": "not measured" if gained is None else f"{gained:+.4f}",
        "hours": _known(hours, ".4f"),
        "GPU-hours": _known(gpu_hours, ".4f"),
        "images": _known(images, ",.0f"),
        "images a second": _known(last_of(recorded, "perf/total_num_images") / pace(recorded), ".4g"),
        "GPU-hours for each unit of reward gained": per_gain(gpu_hours, "h"),
        "hours for each unit of reward gained": per_gain(hours, "h"),
        "images for each unit of reward gained": per_gain(images, "images"),
        "orchestration, share of the last step": _known(orchestration, ".1f", " %"),
    }


def where_time_went(recorded: Recorded) -> list[dict[str, Any]]:
    """Each stage's seconds over the run, a recent iteration's, and its share of the run; the longest first."""
    stages = {
        name.removeprefix("timing_s/"): list(finite(points).values())
        for name, points in recorded.metrics.items()
        if name.startswith("timing_s/") and name != "timing_s/step" and not name.startswith((BEHIND, INSIDE))
    }
    stages["orchestration"] = list(finite(recorded.metrics.get("perf/orchestration_s", {})).values())
    whole = sum(finite(recorded.metrics.get("timing_s/step", {})).values())
    if not whole:
        return []
    rows = [
        {
            "stage": name,
            "total": duration(sum(values)),
            "share": 100 * sum(values) / whole,
            "times": len(values),
            "recent": duration(statistics.median(values[-RECENT:])),
        }
        for name, values in stages.items()
        if values
    ]
    return sorted(rows, key=lambda row: -row["share"])


def reward_charts(runs: Sequence[Recorded], size: tuple[int, int] = SIZE) -> Iterator[Chart]:
    """Held-out and training rewards with bands over prompts: of one run both in a chart, of several each its own."""
    columns = reward_columns(runs)
    if len(runs) == 1:
        for column, label in columns.items():
            lines = [_reward_line(runs[0], kind, column, word, n) for n, (kind, word) in enumerate(WORDS.items())]
            yield from _drawn(label, lines, size)
        return
    for kind, word in WORDS.items():
        for column, label in columns.items():
            there = [(n, r) for n, r in enumerate(runs) if column == "reward" or column[len("reward/") :] in r.weights]
            lines = [_reward_line(r, kind, column, r.name, n) for n, r in there]
            yield from _drawn(f"{word} {label}", lines, size)


def policy_charts(runs: Sequence[Recorded]) -> Iterator[Chart]:
    """What an update does, and how long it takes."""
    for title, metrics in POLICY.items():
        lines = [
            Series(_line_name(runs, recorded, metric), recorded.metrics[metric], colour=len(metrics) * n + m)
            for n, recorded in enumerate(runs)
            for m, metric in enumerate(metrics)
            if metric in recorded.metrics
        ]
        yield from _drawn(title, lines)


def traces(recorded: Recorded) -> list[Trace]:
    """Every metric."""
    rows = []
    for name, points in sorted(recorded.metrics.items()):
        values = list(finite(points).values())
        ends = (number(values[0]), number(values[-1])) if values else ("missing", "missing")
        rows.append(Trace(name, *ends, sparkline(points)))
    return rows


def guards(recorded: Recorded) -> list[dict[str, Any]]:
    """What is watched while the reward rises: each guard's trend, its fall, and whether validations flag it."""
    rows = []
    watched_by = (name for name in recorded.metrics if name.startswith("guard/") and name.endswith("/flag"))
    for name in sorted(metric[len("guard/") : -len("/flag")] for metric in watched_by):
        verdicts = recorded.metrics[f"guard/{name}/flag"]
        flags = [step for step, value in verdicts.items() if value]
        watched = next(
            (n for n in (f"train/reward/{name}/mean", f"train/image/{name}/mean") if n in recorded.metrics), ""
        )
        values = list(finite(recorded.metrics.get(watched, {})).values())
        rows.append(
            {
                "name": name,
                "tau": number(last_of(recorded, f"guard/{name}/tau")),
                "first": number(values[0]) if values else "missing",
                "last": number(values[-1]) if values else "missing",
                "fall": _known(last_of(recorded, f"guard/{name}/fall"), ".2f"),
                "since": min(flags) if flags else None,
                "now": bool(verdicts[max(verdicts)]),
                "curve": sparkline(recorded.metrics.get(watched, {})),
            }
        )
    return rows


def warnings(recorded: Recorded) -> list[tuple[str, str]]:
    """What the run's tags say against it."""
    tags = recorded.run.data.tags
    words = {
        HACKING_TAG: "This may be reward hacking",
        COLLAPSE_TAG: "The held-out reward collapsed",
        FLOOR_TAG: "The reward may not work",
        REGRESSION: "Its weights got worse",
        UNMOVED_TAG: "The weights never moved",
    }
    return [(said, tags[tag]) for tag, said in words.items() if tag in tags]


def missing_rewards(recorded: Recorded) -> dict[str, int]:
    """Reward -> how often it was missing, of those that ever were: in training and held out."""
    names = [
        name for name in recorded.metrics if name.endswith("/missing") and name.startswith(("reward/", "val/reward"))
    ]
    counts = {name: int(sum(finite(recorded.metrics[name]).values())) for name in names}
    return {name: count for name, count in counts.items() if count}


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Fields whose values differ, a missing one empty."""
    flattened = [as_parameters(config) for config in configs]
    fields = sorted({field for config in flattened for field in config})
    values = {field: [str(config.get(field, "")) for config in flattened] for field in fields}
    return [(field, row) for field, row in values.items() if len(set(row)) > 1]


def lineage(recorded: Recorded) -> list[tuple[str, str]]:
    """Where the run came from."""
    tags, environment = recorded.run.data.tags, recorded.environment
    dirty = {"true": "files differed from it: lineage/<iteration>/code.patch", "false": "no file differed from it"}
    inputs = recorded.run.inputs.dataset_inputs if recorded.run.inputs else ()
    starts = sorted(filter(None, (Start.parsed(tag.removeprefix(TAG)) for tag in tags if tag.startswith(TAG))))
    rows = [
        ("MLflow run", recorded.run.info.run_id),
        ("commit", tags.get(mlflow_tags.MLFLOW_GIT_COMMIT, "none")),
        ("working copy", dirty.get(tags.get("doubleflow.git_dirty", ""), "not recorded")),
        *((_of_start(start), tags[start.tag]) for start in starts),
        ("config digest", tags.get("doubleflow.config_digest", "not recorded")),
        ("data digest", tags.get("doubleflow.data_digest", "not recorded")),
        *((f"data {d.dataset.name}", d.dataset.digest) for d in inputs),
        *((t.replace("reward.", "reward "), v) for t, v in sorted(tags.items()) if t.startswith("reward.")),
    ]
    hardware = environment.get("hardware", {})
    if hardware:
        rows.append(("machine", f"{hardware['machine']}, {hardware['cpus']} CPUs, {hardware['memory_gib']} GiB"))
        rows.append(("Python", str(environment.get("python", ""))))
    return rows


def duration(seconds: float) -> str:
    """As a person says it."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{_three_digits(seconds / 3600)} h"


def _three_digits(value: float) -> str:
    """All of a large number: 1,580, and not 1.58e+03."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def moment(milliseconds: int | None) -> str:
    """A time in UTC; empty where there is none."""
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M} UTC" if milliseconds else ""


def _of_start(start: Start) -> str:
    return f"start{f' {start.number}' if start.number > 1 else ''} after iteration {start.iteration}"


def _reward_line(recorded: Recorded, kind: str, column: str, name: str, colour: int) -> Series:
    means, band = recorded.bands({"val": "held_out", "train": "sampled"}[kind], column)
    whole = "critic/rewards/mean" if (kind, column) == ("train", "reward") else f"{kind}/{column}/mean"
    return Series(name, recorded.metrics.get(whole) or means, band, colour)


def _line_name(runs: Sequence[Recorded], recorded: Recorded, metric: str) -> str:
    names = [recorded.name] if len(runs) > 1 else []
    prefix = metric.split("/")[0]
    return " ".join([*names, *([WORDS[prefix]] if prefix in WORDS else [])]) or metric


def _drawn(title: str, lines: Sequence[Series], size: tuple[int, int] = SIZE) -> Iterator[Chart]:
    chart = line_chart(title, lines, size)
    if chart is not None:
        yield chart


def _before_now(points: Mapping[int, float]) -> str:
    if not points:
        return "missing"
    first, last = points[min(points)], points[max(points)]
    return number(last) if len(points) == 1 else f"{number(first)} → {number(last)}"


def _gained(recorded: Recorded) -> str:
    interval = gain(recorded)
    if interval is None:
        return "measured once" if len(recorded.held_out) == 1 else "no prompts to pair"
    return f"{interval}, paired by prompt"


def _known(value: float, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if math.isfinite(value) else "not measured"
