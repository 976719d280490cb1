# SPDX-License-Identifier: Apache-2.0
"""Compare two recorded runs: one HTML page with their configs, curves, rewards, costs and pictures."""

if __name__ == "__main__":  # before the imports that take seconds, so that a wrong command is answered at once
    from tasks.cli.stopping import end_now, handle

    handle(end_now)
    from tasks.cli.commands import main

    main("compare")

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from tasks.config.tracking import TrackingConfig
from tasks.records.comparison import ComparisonError, Interval, paired_gain
from tasks.records.headline import run_address
from tasks.records.history import RunHistory
from tasks.records.tracking import mlflow_client
from tasks.report.page import GRID_TITLES, PERCENT, environment, viewer
from tasks.report.recorded import CONFIDENCE, Recorded, read, reward_columns
from tasks.report.sections import cost, differences, policy_charts, reward_charts
from tasks.run.measured_alike import other_versions
from tasks.system.files import put_in_place

MEASURES = re.compile(
    r".*\.(val_kwargs|rollout\.pipeline)\..*|reward\.functions\..*\.(weight|reward|required|guard|frame_interval|options.*)"
)
"""Fields that say what a held-out picture and its reward are."""


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
    first, second = (read(RunHistory(client, run_id), GRID_TITLES) for run_id in (run, against))
    with put_in_place(page) as aside:
        aside.write_text(render(first, second))
    client.log_artifact(run, str(page), "compare")
    there = run_address(client.tracking_uri, first.run.info.experiment_id, run, f"artifacts/compare/{page.name}")
    create_markdown_artifact(card(first, second, there), key="compare-gains", description=f"{first.name}: {page}")
    return str(page)


def card(first: Recorded, second: Recorded, address: str | None) -> str:
    """Prefect's card: the differences, and a link to the page where it has an address."""
    links = [] if address is None else [f"[the page of both]({address})"]
    return "\n".join([*(f"- {label}: {gain}" for label, gain in paired(first, second)), "", *links])


def render(first: Recorded, second: Recorded) -> str:
    """The page."""
    both = (first, second)
    costs = [cost(recorded) for recorded in both]
    return (
        environment(Path(__file__).parent)
        .get_template("compare.html.j2")
        .render(
            runs=[{"name": r.name, "id": r.run.info.run_id} for r in both],
            summary=[(label, [values[label] for values in costs]) for label in costs[0]],
            paired=paired(first, second),
            paired_note=paired_note(first, second),
            percent=PERCENT,
            differences=differences([r.config for r in both]),
            charts=[*reward_charts(both), *policy_charts(both)],
            viewers=[shown for shown in (viewer(kind, both) for kind in GRID_TITLES) if shown],
            samples=_samples(both),
        )
    )


def paired(first: Recorded, second: Recorded) -> list[tuple[str, Interval]]:
    """The difference of every reward that both measured, on the last held-out pictures that they have in common."""
    if not first.held_out or not second.held_out:
        return []
    table, reference = (r.held_out[max(r.held_out)] for r in (first, second))
    found = []
    for column, label in reward_columns((first, second)).items():
        if column in table and column in reference:
            with suppress(ComparisonError):  # fewer than two prompts have this reward in both
                found.append((label, paired_gain(table, reference, column, CONFIDENCE)))
    return found


def paired_note(first: Recorded, second: Recorded) -> str:
    """What the differences are of, and what they have of two ways to measure, if the runs have two."""
    note = "The last held-out pictures of both, paired by prompt and noise; a guard has weight 0."
    fields = [path for path, _ in differences([first.config, second.config]) if MEASURES.fullmatch(path)]
    fields += other_versions(first.run.data.tags, second.run.data.tags)
    if not fields:
        return note
    return f"{note} They were not measured alike, which these differences have in them, too: {', '.join(fields)}."


def _samples(both: Sequence[Recorded]) -> list[dict[str, object]]:
    """The worst held-out pictures of each run, which tell more than the best; none where neither has any."""
    kept = [(r.name, *r.samples["held-out"]) for r in both if "held-out" in r.samples]
    return [
        {"name": name, "step": step, "worst": [sample for sample in samples if sample.end == "worst"]}
        for name, step, samples in kept
    ]
