# SPDX-License-Identifier: Apache-2.0
"""Compare two recorded runs: one HTML page with their configs, curves, rewards, costs and pictures."""

if __name__ == "__main__":  # before the imports that take seconds, so that a wrong command is answered at once
    from flows.stopping import end_now, handle

    handle(end_now)
    from flows.commands import main

    main("compare")

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from prefect import flow
from prefect.artifacts import create_markdown_artifact

from tasks.config.tracking import TrackingConfig
from tasks.records.comparison import Interval, mean_interval, paired_gain
from tasks.records.history import RunHistory
from tasks.records.model_registry import TABLE
from tasks.records.tracking import STEP_MARK, flat, mlflow_client

matplotlib.use("agg")  # a flow run has no display
CONFIDENCE = 0.95
BAND_POINTS = 40
"""Most points of a curve that get a band; of a longer curve they are spread evenly."""
PLACEHOLDERS = {"set": "test", "steps": 0, "guidance": 0.0, "seed": 0}


@dataclass(frozen=True)
class Recorded:
    """What the page needs of one run.

    Attributes:
        metrics: metric -> step -> value.
        held_out: step -> rewards of the held-out pictures, with the columns of `PAIR`.
        sampled: step -> rewards of the training pictures.
        weights: reward -> its share of the trained reward; 0 is a guard.
    """

    history: RunHistory
    config: dict[str, Any]
    metrics: dict[str, dict[int, float]]
    held_out: dict[int, pd.DataFrame]
    sampled: dict[int, pd.DataFrame]
    weights: dict[str, float]

    @property
    def rewards(self) -> list[str]:
        """Columns of the trained reward and of every reward by itself."""
        return ["reward", *(f"reward/{name}" for name in self.weights)]


@flow(name="compare", flow_run_name="compare {run} {against}", persist_result=False)
def compare(run: str, against: str, tracking: TrackingConfig | None = None, folder: Path = Path("runs")) -> str:
    """Write a page that compares two runs, and put it with the first one in MLflow.

    Args:
        run: MLflow run id, of a training run or of a validation sweep's measurement.
        against: another one.
        tracking: where MLflow is.
        folder: where the page is written; the answer is its path.
    """
    client = mlflow_client(tracking or TrackingConfig())
    page = folder.resolve() / f"compare-{run[:8]}-{against[:8]}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    first, second = (read(RunHistory(client, run_id)) for run_id in (run, against))
    page.write_text(render(first, second))
    client.log_artifact(run, str(page), "compare")
    gains = "\n".join(f"- {label}: {gain}" for label, gain in paired(first, second))
    create_markdown_artifact(gains, key="compare-gains", description=f"{first.history.name}: {page}")
    return str(page)


def read(history: RunHistory) -> Recorded:
    """Everything the page needs of one run."""
    config = history.config()
    artifacts = {item.path for item in history.client.list_artifacts(history.run_id)}
    if TABLE in artifacts:
        held_out = {max(history.metrics()[STEP_MARK]): pd.read_parquet(history.file(TABLE))}
    else:
        validated = history.steps("validation")
        held_out = {step: history.table("validation", step).assign(**PLACEHOLDERS) for step in validated}
    steps = history.steps("samples")
    sampled = {step: history.table("samples", step) for step in steps[:: max(len(steps) // BAND_POINTS, 1)]}
    functions = config["reward"]["functions"]
    weights = {name: 0.0 if entry.get("guard") else entry["weight"] for name, entry in functions.items()}
    return Recorded(history, config, history.metrics(), held_out, sampled, weights)


def render(first: Recorded, second: Recorded) -> str:
    """The page."""
    both = (first, second)
    template = jinja2.Template(Path(__file__).with_suffix(".html.j2").read_text(), autoescape=True)
    return template.render(
        names=[r.history.name for r in both],
        runs=[{"name": r.history.name, "id": r.history.run_id} for r in both],
        summary=[(label, [values.get(label, "") for values in map(summary, both)]) for label in summary(first)],
        paired=paired(first, second),
        paired_note="The last held-out pictures of both, paired by prompt and noise; a guard has weight 0.",
        percent=round(100 * CONFIDENCE),
        differences=differences(first.config, second.config),
        curves=[{"name": name, "png": _encoded(curve)} for name, curve in curves(both)],
        pictures=list(pictures(both)),
    )


def summary(recorded: Recorded) -> dict[str, str]:
    """Cost, and what it bought."""
    last = {name: points[max(points)] for name, points in recorded.metrics.items()}
    held_out = recorded.metrics.get("val/reward/mean", {})
    gained = held_out[max(held_out)] - held_out[min(held_out)] if held_out else 0.0
    hours, gpu_hours, images = (last.get(f"cost/{name}", 0.0) for name in ("hours", "gpu_hours", "images"))

    def per_gain(spent: float, unit: str) -> str:
        return f"{spent / gained:.4g} {unit}" if gained > 0 else "no gain"

    return {
        "iterations": f"{max(last.get('trainer/global_step', 0.0), 0.0):.0f}",
        "held-out reward": f"{held_out[max(held_out)]:.4f}" if held_out else "",
        "held-out reward gained": f"{gained:+.4f}",
        "hours": f"{hours:.4f}",
        "GPU-hours": f"{gpu_hours:.4f}",
        "images": f"{images:.0f}",
        "GPU-hours for each unit of reward gained": per_gain(gpu_hours, "h"),
        "hours for each unit of reward gained": per_gain(hours, "h"),
        "images for each unit of reward gained": per_gain(images, "images"),
        "orchestration, share of the last step": f"{100 * last.get('perf/orchestration_share', float('nan')):.1f} %",
    }


def paired(first: Recorded, second: Recorded) -> list[tuple[str, Interval]]:
    """The difference of every reward that both measured, on the last held-out pictures."""
    if not first.held_out or not second.held_out:
        return []
    table, reference = (r.held_out[max(r.held_out)] for r in (first, second))
    common = [name for name in first.rewards if name in table and name in reference]
    return [(_label(name, first.weights), paired_gain(table, reference, name, CONFIDENCE)) for name in common]


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Fields whose values differ, a missing one empty."""
    flattened = [flat(config) for config in (first, second)]
    fields = sorted(flattened[0].keys() | flattened[1].keys())
    values = {field: [str(config.get(field, "")) for config in flattened] for field in fields}
    return [(field, pair) for field, pair in values.items() if pair[0] != pair[1]]


def curves(both: Sequence[Recorded]) -> Iterator[tuple[str, plt.Figure]]:
    """Held-out and training rewards against iterations, with bands."""
    for kind, source in (("held-out", "held_out"), ("training", "sampled")):
        names = dict.fromkeys(name for recorded in both for name in recorded.rewards)
        for name in names:
            figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
            for number, recorded in enumerate(both):
                tables = {step: table for step, table in getattr(recorded, source).items() if name in table}
                if tables:
                    _band(axes, tables, name, f"C{number}", recorded.history.name)
            axes.set(xlabel="iteration", ylabel=name, title=f"{kind} {_label(name, both[0].weights)}")
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
                yield f"{kind} {name}", figure
            plt.close(figure)


def _band(axes: plt.Axes, tables: Mapping[int, pd.DataFrame], name: str, colour: str, label: str) -> None:
    steps, intervals = [], []
    for step, table in sorted(tables.items()):
        prompts = table.groupby("uid")[name].mean().dropna().to_numpy(float)
        if len(prompts) > 1:
            steps.append(step)
            intervals.append(mean_interval(prompts, CONFIDENCE, resamples=999))
    axes.plot(steps, [i.mean for i in intervals], "o-", markersize=3, color=colour, label=label)
    axes.fill_between(steps, [i.low for i in intervals], [i.high for i in intervals], color=colour, alpha=0.2)


def pictures(both: Sequence[Recorded]) -> Iterator[dict[str, str]]:
    """The first and the last grid of each kind, of both runs."""
    for recorded in both:
        for key, steps in recorded.history.pictures().items():
            for step in sorted({min(steps), max(steps)}):
                content = recorded.history.file(steps[step]).read_bytes()
                title = f"{recorded.history.name}: {key}, iteration {step}"
                yield {"title": title, "png": base64.b64encode(content).decode()}


def _label(name: str, weights: Mapping[str, float]) -> str:
    return f"{name} (guard)" if weights.get(name.removeprefix("reward/")) == 0 else name


def _encoded(figure: plt.Figure) -> str:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()
