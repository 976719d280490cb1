# SPDX-License-Identifier: Apache-2.0
"""How far a run is, what it has learnt and how long it will take, in the terminal and on Prefect's page."""

import base64
import math
import os
import sys
import time
from collections.abc import Mapping
from io import BytesIO
from typing import cast
from uuid import UUID

from PIL import Image
from prefect.artifacts import create_link_artifact, create_progress_artifact, update_progress_artifact
from tqdm import tqdm

from tasks.records.flow_page import run_links, tell
from tasks.run.held_out_grids import kept_grids
from tasks.run.summary import Summary
from tasks.run.training import TrainingRun

SECONDS_BETWEEN_UPDATES = 15.0
"""Of Prefect's artifact; an update draws the curve and is a request."""
CURVES = {"reward": "critic/rewards/mean", "held-out": "val/reward/mean"}
"""Label -> metric."""
Curves = Mapping[str, Mapping[int, float]]
"""Label -> iteration -> value."""
GRID_WIDTH = 800
"""Pixels of the held-out grid on Prefect's page."""


class Progress:
    """A line for each iteration on the flow run's page and in the terminal, and a progress artifact.

    The artifact has the last line, the curve of the rewards, the last held-out pictures and links. A terminal shows a
    bar, which draws over itself, with the same numbers.

    Args:
        run: whose iterations they are.
        total: iterations.
        done: of these, those that a resumed run has behind it.
    """

    def __init__(self, run: TrainingRun, total: int, done: int):
        self.run, self.total = run, total
        self.curves = {label: run.tracker.history(metric) for label, metric in CURVES.items()}
        shown = sys.stderr.isatty()
        stream = sys.stderr if shown else open(os.devnull, "w")  # noqa: SIM115  closed with the bar
        self._bar = tqdm(total=total, initial=done, desc="training", unit="it", dynamic_ncols=True, file=stream)
        self._line, self._lines, self._grid = run.config.run_name, None if shown else sys.stderr, ("", "")
        artifact = create_progress_artifact(
            progress=100 * done / total, key="training", description=self._page(self._line, self.curves)
        )
        self._artifact = cast(UUID, artifact)  # Prefect's signature allows for a coroutine, as in async code
        self._updated = time.monotonic()

    def validated(self) -> None:
        """The weights that the run begins with have been measured."""
        self.curves["held-out"][self.run.iteration] = self.run.held_out
        self._tell(f"iteration {self.run.iteration}/{self.total}: held-out {self.run.held_out:.3f}")
        self._update(self._bar.n, self._line, self.curves)

    def advance(self, number: int, metrics: Mapping[str, float]) -> None:
        """An iteration is done, with these metrics."""
        for label, metric in CURVES.items():
            if metric in metrics:
                self.curves[label][number] = metrics[metric]
        numbers = iteration_numbers(metrics, self.run.held_out)
        self._bar.set_postfix_str(", ".join(numbers), refresh=False)
        self._bar.update()
        self._tell(", ".join([f"iteration {number}/{self.total}: {numbers[0]}", *numbers[1:], self._left()]))
        last = number >= self.total
        if last or CURVES["held-out"] in metrics or time.monotonic() - self._updated >= SECONDS_BETWEEN_UPDATES:
            self._updated = time.monotonic()
            # Drawn and sent behind the run, which it would hold up for a good part of a second.
            self.run.behind.submit(self._update, self._bar.n, self._line, _copied(self.curves))

    def close(self, summary: Summary) -> str:
        """Leave the bar as it is, and the run's end and its links on the page; the end in a sentence."""
        self._bar.close()
        links = run_links(self.run.tracker, self.run.config.run_dir)
        for name, address in links.items():
            if address.startswith("http"):
                create_link_artifact(address, key=f"{name.lower()}-page", description=f"{name} of {summary.run_name}")
        said = last_words(summary, links)
        tell(said)
        self._line = said
        self._update(self._bar.n, said, self.curves)
        return said

    def _tell(self, line: str) -> None:
        self._line = line
        tell(line)
        if self._lines is not None:
            print(line, file=self._lines, flush=True)

    def _left(self) -> str:
        rate = self._bar.format_dict["rate"] or (self._bar.n - self._bar.initial) / self._bar.format_dict["elapsed"]
        return f"{tqdm.format_interval((self.total - self._bar.n) / rate)} left"

    def _update(self, done: int, line: str, curves: Curves) -> None:
        progress = 100 * done / self.total
        update_progress_artifact(self._artifact, progress=progress, description=self._page(line, curves))

    def _page(self, line: str, curves: Curves) -> str:
        """Of markdown; Prefect's list of artifacts shows its first paragraph."""
        links = run_links(self.run.tracker, self.run.config.run_dir)
        named = [f"[{name}]({address})" if address.startswith("http") else address for name, address in links.items()]
        curve = f"![reward against iterations]({drawn(curves)})" if any(curves.values()) else ""
        return "\n\n".join(filter(None, [line, curve, self._last_grid(), " · ".join(named)]))

    def _last_grid(self) -> str:
        found = kept_grids(self.run.config)
        if not found:
            return ""
        last = max(found)
        title = f"held-out pictures, iteration {last}"
        if self._grid[0] != title:
            self._grid = title, encoded(Image.open(found[last]))
        return f"{title}\n\n![{title}]({self._grid[1]})"


def iteration_numbers(metrics: Mapping[str, float], held_out: float) -> list[str]:
    """What a line says of an iteration; what was not measured is left out."""
    seconds, images = (metrics.get(f"perf/{name}", math.nan) for name in ("time_per_step", "total_num_images"))
    found = {
        "reward {:.3f}": metrics.get("critic/rewards/mean", math.nan),
        "held-out {:.3f}": held_out,
        "clipped {:.1%}": metrics.get("actor/pg_clipfrac", math.nan),
        "{:.1f} s": seconds,
        "{:.3g} images/s": images / seconds,
    }
    return [text.format(value) for text, value in found.items() if not math.isnan(value)] or ["done before"]


def last_words(summary: Summary, links: Mapping[str, str]) -> str:
    """A run's end in a sentence: reward, weights, links."""
    measured = "held-out not measured"
    if summary.validations:
        measured = f"held-out {summary.held_out_before:.3f} -> {summary.held_out_after:.3f}"
    weights = f"weights {summary.weights}, {summary.registered}" if summary.weights else "weights as before"
    pages = [f"{name} {address}" for name, address in links.items()]
    return "; ".join([f"{summary.run_name}: {measured} after {summary.iterations} iterations", weights, *pages])


def _copied(curves: Curves) -> Curves:
    return {label: dict(points) for label, points in curves.items()}


def drawn(curves: Curves) -> str:
    """Curves against iterations as an address that holds the picture; held-out rewards are marked one by one."""
    from matplotlib.figure import Figure  # here: a second of work, which a run may do while it waits for its actors

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        style = "o-" if label == "held-out" else "-"
        axes.plot(sorted(points), [points[step] for step in sorted(points)], style, markersize=4, label=label)
    axes.set(xlabel="iteration", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def encoded(sheet: Image.Image) -> str:
    """A picture as an address that holds it, at most `GRID_WIDTH` wide."""
    small = sheet.convert("RGB")
    small.thumbnail((GRID_WIDTH, 10 * GRID_WIDTH))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
