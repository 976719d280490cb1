# SPDX-License-Identifier: Apache-2.0
"""Write a recorded run's page anew: `python -m flows.report RUN`."""

if __name__ == "__main__":  # before the imports that take seconds, so that a wrong command is answered at once
    from tasks.cli.stopping import end_now, handle

    handle(end_now)
    from tasks.cli.commands import main

    main("report")

from pathlib import Path

from tasks.records.headline import REPORT
from tasks.records.history import RunHistory
from tasks.records.owner import without_a_word
from tasks.report.page import links, render
from tasks.report.recorded import read
from tasks.system.files import put_in_place


def report(history: RunHistory, folder: Path | None = None, beside: Path = Path("runs")) -> Path:
    """Write the page of a run from what MLflow has, and put it with the run there.

    Args:
        history: of the run.
        folder: the run's own, where the page is written; None where that is not here.
        beside: the folder that gets the page then.

    Returns:
        The page.
    """
    page = beside / f"report-{history.run_id[:8]}.html" if folder is None else folder / REPORT
    ended = without_a_word(history.run)
    content = render(read(history), links(history.client, history.run), "FAILED" if ended else "", ended or "")
    with put_in_place(page) as aside:
        aside.write_text(content)
    history.client.log_text(history.run_id, content, REPORT)
    return page
