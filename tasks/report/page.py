# SPDX-License-Identifier: Apache-2.0
"""The page of a run, `report.html`: what is recorded of it, in one file that needs nothing from elsewhere."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tasks.records.headline import FLOW_RUN_TAG, run_address
from tasks.report import sections
from tasks.report.charts import LIGHT, MARKS, Chart, Series, line_chart, number, spread
from tasks.report.recorded import CONFIDENCE, FRAMES, Recorded
from tasks.system.late_mlflow import MlflowClient, Run

TEMPLATES = Path(__file__).parent
STATES = {"RUNNING": "running", "FINISHED": "finished", "FAILED": "failed", "KILLED": "killed", "SCHEDULED": "waiting"}
PERCENT = round(100 * CONFIDENCE)
MOST_FRAMES = FRAMES + 2
HERO_SIZE = (520, 270)
GRID_TITLES = {"validation": "Held-out pictures", "samples": "Training pictures"}


def environment(*folders: Path) -> jinja2.Environment:
    """Jinja with the parts that pages share; everything that is put into a page is escaped."""
    loader = jinja2.FileSystemLoader([*folders, TEMPLATES])
    made = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    made.globals |= {"light": Markup(LIGHT), "marks": Markup(MARKS)}
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return made


def render(recorded: Recorded, links: Mapping[str, str] | None = None, ended: str = "", reason: str = "") -> str:
    """The page.

    Args:
        recorded: of the run.
        links: label -> address of other pages about it.
        ended: how it ends now, where MLflow has not been told: FINISHED, FAILED or KILLED.
        reason: why it failed.
    """
    info = recorded.run.info
    state = ended or info.status
    done, total = sections.progress(recorded)
    left = sections.pace(recorded) * (total - done)
    return (
        environment()
        .get_template("run.html.j2")
        .render(
            name=recorded.name,
            state=STATES.get(state, state.lower()),
            reason=reason,
            done=done,
            total=total,
            left=sections.duration(left) if state == "RUNNING" and done < total else "",
            started=sections.moment(info.start_time),
            written=sections.moment(int(time.time() * 1000)),
            links=links or {},
            tiles=sections.tiles(recorded),
            warnings=sections.warnings(recorded),
            missing=sections.missing_rewards(recorded),
            hero=hero(recorded),
            percent=PERCENT,
            viewer=viewer("validation", [recorded]),
            charts=[*list(sections.reward_charts([recorded]))[1:], *sections.policy_charts([recorded])],
            samples=recorded.samples,
            guards=sections.guards(recorded),
            cost=sections.cost(recorded),
            stages=sections.where_time_went(recorded),
            overrides=recorded.overrides,
            chosen=sorted(recorded.run.data.params.items()),
            config=json.dumps(recorded.config, indent=1),
            lineage=sections.lineage(recorded),
            packages=sorted(recorded.environment.get("packages", {}).items()),
            traces=sections.traces(recorded),
        )
    )


def links(client: MlflowClient, run: Run) -> dict[str, str]:
    """Addresses of the run's other pages, in MLflow and Prefect, where those are servers that stay."""
    pages = {
        "MLflow": run_address(client.tracking_uri, run.info.experiment_id, run.info.run_id),
        "Prefect": run.data.tags.get(FLOW_RUN_TAG),
    }
    return {name: page for name, page in pages.items() if page}


def viewer(kind: str, runs: Sequence[Recorded]) -> dict[str, Any] | None:
    """Grids under one slider, a column a run; None where no run has any.

    A run without a grid at a step shows its last one before it.
    """
    grids = [recorded.grids.get(kind, {}) for recorded in runs]
    shown = [[(step, found[step]) for step in spread(found, MOST_FRAMES)] for found in grids]
    columns = [
        {"name": recorded.name, "frames": [_frame(recorded, kind, *frame) for frame in frames]}
        for recorded, frames in zip(runs, shown, strict=True)
    ]
    steps = sorted({step for frames in shown for step, _ in frames})
    return {"title": GRID_TITLES[kind], "columns": columns, "steps": steps} if steps else None


def hero(recorded: Recorded, size: tuple[int, int] = HERO_SIZE) -> Chart | None:
    """The first chart: the trained reward, held out and in training."""
    reward = next(sections.reward_charts([recorded], size), None)
    loss = recorded.metrics.get("actor/pg_loss", {})
    return reward or line_chart("policy loss", [Series("loss", loss)], size)  # offline there is no reward


def _frame(recorded: Recorded, kind: str, step: int, src: str) -> dict[str, Any]:
    """A grid, and the mean reward of its iteration."""
    metric = {"validation": sections.HELD_OUT, "samples": "critic/rewards/mean"}[kind]
    value = recorded.metrics.get(metric, {}).get(step)
    return {"step": step, "src": src, "note": "" if value is None else f"reward {number(value)}"}
