# SPDX-License-Identifier: Apache-2.0
"""What a command says of a server that is not there, and how soon: MLflow's or Ray's, at its start and during a run.

    python -m benchmarks.outages [--cases "MLflow: nobody at the address" ...] [--log outages.jsonl] [--write]

Each case is the quickstart's small form in a temporary folder, on a Prefect server of its own. Prints a line of JSON a
case, which is also added to `--log`, and a table of the newest line of each case, which `--write` puts into the docs
(`--cases` without any: the table alone). The seconds are the command's from its start, or, where a server dies during
the run, from that moment on. After a run that a dead server ended, the server is back and the same command must go on.
"""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.endings import UPDATE, Watched, make_folder, measure_cases, silent_server
from benchmarks.kill_rounds import SMALL
from benchmarks.local_services import ROOT, Services, import_path, wait_until
from tasks.records.tracking import STEP_MARK
from tasks.system.ports import free_port
from tasks.system.processes import runs

DOCS = Path("docs/first-use.md")
PATIENCE = 900
OUTAGE_S, SHORT_S, LONG_S = 20, 12, 300
"""`tracking.max_outage_s` of the runs, for how long a server that comes back is away before it starts, which takes as
long again on a busy machine, and `max_outage_s` there."""
MARK = "DOUBLEFLOW_MEASURED"


@contextmanager
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    yield f"127.0.0.1:{free_port()}"


@contextmanager
def somebody_silent() -> Iterator[str]:
    """An address at which somebody listens and never answers."""
    with silent_server() as url:
        yield url.removeprefix("http://")


@dataclass(frozen=True)
class Case:
    """A variable that names a wrong address; without one MLflow's server dies during an update."""

    variable: str = ""
    address: Callable[[], Any] = nobody
    comes_back: bool = False


CASES = {
    "MLflow: nobody at the address": Case("MLFLOW_TRACKING_URI"),
    "MLflow: connects, does not answer": Case("MLFLOW_TRACKING_URI", somebody_silent),
    "RAY_ADDRESS: nobody there": Case("RAY_ADDRESS"),
    "RAY_ADDRESS: connects, does not answer": Case("RAY_ADDRESS", somebody_silent),
    f"MLflow dies during an update, max_outage_s {OUTAGE_S}": Case(),
    f"MLflow dies during an update, is started after {SHORT_S} s": Case(comes_back=True),
}


def measure(name: str, base: Path) -> dict[str, Any]:
    """Run one case, and tell what was said of it."""
    case, folder = CASES[name], base / str([*CASES].index(name))
    make_folder(folder, ROOT)
    server = Services(folder)
    patience = f"tracking.max_outage_s={LONG_S if case.comes_back else OUTAGE_S}"
    command = [sys.executable, "-m", "flows.train", "quickstart", "--set", patience]
    with case.address() as address:
        environment = _environment(case, folder, server, address)
        begun, load = time.monotonic(), os.getloadavg()[0]
        with _ended(Watched.started(command, folder, environment), server) as watched:
            if not case.variable:
                begun, load = _killed_in_an_update(watched, server)
            if case.comes_back:
                time.sleep(SHORT_S)
                server.start("mlflow")
            code = watched.process.wait(PATIENCE)
            ended, page = time.monotonic(), _warnings(folder / ".prefect" / "prefect.db")
            again = "" if case.variable or case.comes_back else _continued(command, folder, environment, server)
    return {
        "case": name,
        "load": round(load, 1),
        "code": code,
        **_said_of_it(case, watched, begun),
        "ended_s": round(ended - begun, 1),
        "page": page,
        "warnings": len(page),
        "again": again,
    }


def _environment(case: Case, folder: Path, server: Services, address: str) -> dict[str, str]:
    """The command's: with the case's wrong address, or that of an MLflow server that is up now."""
    own = {"PREFECT_HOME": str(folder / ".prefect"), "PYTHONPATH": import_path(ROOT), "PYTHONUNBUFFERED": "1"}
    environment = os.environ | own | {MARK: str(folder)}
    if case.variable:
        scheme = "http://" if case.variable == "MLFLOW_TRACKING_URI" else ""
        return environment | {case.variable: scheme + address}
    server.start("mlflow")
    return environment | {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{server.ports['mlflow']}"}


@contextmanager
def _ended(watched: Watched, server: Services) -> Iterator[Watched]:
    """After the block nothing is left of the command and of the servers."""
    try:
        yield watched
    finally:
        for member in watched.family():
            with suppress(psutil.Error):
                member.kill()
        for left in list(server.running):
            server.kill(left)


def _killed_in_an_update(watched: Watched, server: Services) -> tuple[float, float]:
    """The moment at which MLflow's server was killed, once the run was at an update, and the machine's load then."""
    process = watched.process
    wait_until(lambda: not runs(process) or UPDATE(watched), PATIENCE, "the update", every=0.2)
    watched.refuse_ended("an update")
    server.kill("mlflow")
    return time.monotonic(), os.getloadavg()[0]


def _said_of_it(case: Case, watched: Watched, begun: float) -> dict[str, Any]:
    """How many lines the command said of what is not there, the seconds to the first of them, and its last lines."""
    said = [(moment - begun, line) for moment, line in watched.lines if line.strip() and moment >= begun]
    of_it = [(moment, line) for moment, line in said if not case.comes_back or "MLflow at" in line]
    first = next((moment for moment, line in of_it if "MLflow at" in line or line.startswith("error:")), None)
    return {
        "lines": len(of_it),
        "first_s": None if first is None else round(first, 1),
        "said": [f"{moment:.1f} {line}" for moment, line in said][-30:],
    }


def _warnings(database: Path) -> list[str]:
    """What a flow run's page has of warnings and errors, from the database of the server that is gone."""
    if not database.is_file():
        return []
    with closing(sqlite3.connect(database)) as opened:
        return [line for (line,) in opened.execute("SELECT message FROM log WHERE level >= 30 ORDER BY timestamp")]


def _continued(command: Sequence[str], folder: Path, environment: dict[str, str], server: Services) -> str:
    """The same command once the server is back: its exit code, and whether MLflow has each step once."""
    server.start("mlflow")
    code = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=PATIENCE).returncode
    (record,) = folder.glob("runs/*/run.json")
    run_id = json.loads(record.read_text())["mlflow_run_id"]
    steps = sorted(point.step for point in server.client.get_metric_history(run_id, STEP_MARK))
    whole = steps == [*range(SMALL["trainer"]["total_training_steps"] + 1)]
    status = server.client.get_run(run_id).info.status
    return f"{code}, {status}, {'each step once' if whole else f'steps {steps}'}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a case."""
    lines = [
        "| What is not there | Load | Lines | On the run's page | Exit code | Seconds to the first line of it "
        "| To the command's end | The same command then |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = ("case", "load", "lines", "warnings", "code", "first_s", "ended_s", "again")
    return "\n".join([*lines, *(f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows)])


def main() -> None:
    """Measure the cases."""
    measure_cases("outages.py", __doc__, CASES, measure, table, DOCS)


if __name__ == "__main__":
    main()
