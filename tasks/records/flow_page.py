# SPDX-License-Identifier: Apache-2.0
"""What the page of a flow run in Prefect says beside its states: its log, and where else the run can be seen."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from prefect import get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.logging.loggers import LoggingAdapter
from prefect.runtime import flow_run

from tasks.records.headline import REPORT, run_address
from tasks.records.tracking import Tracker

OWN_MODULES = ("tasks", "models")
QUIETER = "prefect.task_runs"
"""Prefect's logger that would tell the end of each of an iteration's seven task runs."""
_outermost: ContextVar[logging.Logger | LoggingAdapter | None] = ContextVar("outermost", default=None)


class _OfFlowRun(logging.Filter):
    """Gives every record to one flow run."""

    def __init__(self, flow_run_id: str):
        super().__init__()
        self.flow_run_id = flow_run_id

    def filter(self, record: logging.LogRecord) -> bool:
        record.flow_run_id = self.flow_run_id
        return True


@contextmanager
def flow_page() -> Iterator[None]:
    """During the block, which begins in a flow run, what is told is on that flow run's page.

    So are the warnings of this project's modules, and what is told in flow runs that start within the block.
    """
    handler = APILogHandler(logging.WARNING)
    handler.addFilter(_OfFlowRun(str(flow_run.id)))
    loggers = [logging.getLogger(name) for name in OWN_MODULES]
    if logging.getLogger(QUIETER).level == logging.NOTSET:  # else somebody wants to see them
        logging.getLogger(QUIETER).setLevel(logging.WARNING)
    token = _outermost.set(get_run_logger())
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        _outermost.reset(token)


def page_logger() -> logging.Logger | LoggingAdapter:
    """The log of the flow run whose page it is, for terminal and page; see `flow_page`."""
    return _outermost.get() or get_run_logger()


def tell(line: str) -> None:
    """A line on the flow run's page alone, also where PREFECT_LOGGING_LEVEL asks for warnings only."""
    logger = page_logger()
    extra = logger.extra if isinstance(logger, logging.LoggerAdapter) else None
    handler = APILogHandler(logging.INFO)
    record = logging.getLogger("prefect.flow_runs").makeRecord(
        "prefect.flow_runs", logging.INFO, __file__, 0, line, (), None, extra=dict(extra or {})
    )
    handler.handle(record)


def say(line: str) -> None:
    """A line on the flow run's page and in the terminal."""
    tell(line)
    print(line, file=sys.stderr, flush=True)


def run_links(tracker: Tracker, folder: Path) -> dict[str, str]:
    """Name -> address of a run's pages, as far as they are there: in MLflow, and its report."""
    page = run_address(tracker.uri, tracker.experiment_id, tracker.run_id)
    links = {} if page is None else {"MLflow": page}
    report = folder / REPORT
    if report.is_file():
        there = run_address(tracker.uri, tracker.experiment_id, tracker.run_id, f"artifacts/{REPORT}")
        links["report"] = there or str(report.resolve())
    return links
