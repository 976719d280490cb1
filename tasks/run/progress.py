# SPDX-License-Identifier: Apache-2.0
"""How far a run is, what it has learnt and how long it will take, in the terminal and on Prefect's page."""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast
from uuid import UUID

from prefect.artifacts import create_link_artifact, create_progress_artifact, update_progress_artifact
from tqdm import tqdm

from tasks.records.flow_page import page_logger, run_links, tell
from tasks.report.sections import HELD_OUT
from tasks.run.summary import Summary
from tasks.run.training import TrainingRun

SECONDS_BETWEEN_UPDATES = 15.0
"""Of Prefect's artifact; an update draws the curve and is a request."""
SECONDS_AFTER_A_FAILURE = 600.0
"""Until the next update is tried."""


class Progress:
    """A line for each iteration on the flow run's page and in the terminal, and a progress artifact.

    The artifact has the last line, the curve of the rewards, the last held-out pictures and links. A terminal shows a
    bar, which draws over itself, with the same numbers. The page is no part of the record: where Prefect's server
    does not take what comes after the start, the run warns, once, and goes on.

    Args:
        run: whose iterations they are.
        total: iterations.
        done: those that a resumed run has behind it; all of them, where it is to be shorter than it already is.
    """

    def __init__(self, run: TrainingRun, total: int, done: int):
        self.run, self.total = run, max(total, done)
        shown = sys.stderr.isatty()
        stream = sys.stderr if shown else open(os.devnull, "w")  # noqa: SIM115  closed with the bar
        self._bar = tqdm(total=self.total, initial=done, desc="training", unit="it", dynamic_ncols=True, file=stream)
        self._line, self._lines = run.config.run_name, None if shown else sys.stderr
        self._failed_at: float | None = None
        if done > total:
            self._tell(f"trainer.total_training_steps is {total}, but {done} iterations are done: none is left")
        artifact = create_progress_artifact(
            progress=100 * done / self.total, key="training", description=self._page(self._line)
        )
        self._artifact = cast(UUID, artifact)  # Prefect's signature allows for a coroutine, as in async code
        self._updated = time.monotonic()

    def show_validation(self) -> None:
        """Tell what the weights that the run begins with were measured to be."""
        self._tell(f"iteration {self.run.iteration}/{self.total}: held-out {self.run.held_out:.3f}")
        self._update(self._bar.n, self._line)

    def advance(self, number: int, metrics: Mapping[str, float]) -> None:
        """Go on by an iteration, which has these metrics."""
        numbers = iteration_numbers(metrics, self.run.held_out)
        self._bar.set_postfix_str(", ".join(numbers), refresh=False)
        self._bar.update()
        self._tell(", ".join([f"iteration {number}/{self.total}: {numbers[0]}", *numbers[1:], self._left()]))
        last, now = number >= self.total, time.monotonic()
        # A server that is away is tried for a minute, for which checkpoints and records wait: not at every turn.
        waits = self._failed_at is not None and now - self._failed_at < SECONDS_AFTER_A_FAILURE
        if not waits and (last or HELD_OUT in metrics or now - self._updated >= SECONDS_BETWEEN_UPDATES):
            self._updated = now
            # Drawn and sent behind the run, which it would hold up, and once the report has the iteration.
            self.run.behind.submit(self._update, self._bar.n, self._line)

    def close(self, summary: Summary) -> str:
        """Leave the bar as it is, and the run's end and its links on the page; the end in a sentence."""
        self._bar.close()
        links = run_links(self.run.tracker, self.run.config.run_dir)
        said = last_words(summary, links)
        tell(said)
        with self._told():
            for name, address in links.items():
                if address.startswith("http"):
                    told_of = f"{name} of {summary.run_name}"
                    create_link_artifact(address, key=f"{name.lower()}-page", description=told_of)
            self._update(self._bar.n, last_words(summary, {}))  # the page has the links below
        return said

    def _tell(self, line: str) -> None:
        self._line = line
        tell(line)
        if self._lines is not None:
            print(line, file=self._lines, flush=True)

    def _left(self) -> str:
        rate = self._bar.format_dict["rate"] or (self._bar.n - self._bar.initial) / self._bar.format_dict["elapsed"]
        return f"{tqdm.format_interval((self.total - self._bar.n) / rate)} left"

    def _update(self, done: int, line: str) -> None:
        with self._told():
            update_progress_artifact(self._artifact, progress=100 * done / self.total, description=self._page(line))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong in the block is a warning, the first time."""
        try:
            yield
        except Exception as error:
            if self._failed_at is None:
                page_logger().warning(
                    "Prefect's page has not got the run's progress (%s: %s): the run goes on, and says this once",
                    type(error).__name__,
                    " ".join(str(error).split()),
                )
            self._failed_at = time.monotonic()

    def _page(self, line: str) -> str:
        """Of markdown; Prefect's list of artifacts shows its first paragraph."""
        links = run_links(self.run.tracker, self.run.config.run_dir)
        named = [f"[{name}]({address})" if address.startswith("http") else address for name, address in links.items()]
        return "\n\n".join(filter(None, [line, self.run.report.card(), " · ".join(named)]))


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
