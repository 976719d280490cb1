# SPDX-License-Identifier: Apache-2.0
"""What a run takes more and more of: memory, open files, the disk and time, over many iterations.

    python -m benchmarks.long_run [--iterations 1000] [--rows 10] [--log long_run.jsonl] [--write]

The small form of `flow-grpo` (`benchmarks.kill_rounds`), with a validation and a checkpoint each twentieth iteration,
in a temporary folder. While it trains, each part of it is a line of JSON in the log. Memory is PSS: a page that several
processes share counts in parts, so that the sum is what they take together. `--write` puts the table into the docs
(`--iterations 0`: that of the log alone).
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient

from benchmarks.docs import put_table, refuse_missing
from benchmarks.endings import MARK
from benchmarks.kill_rounds import workspace
from benchmarks.local_services import ROOT, ending_at_sigterm, import_path, wait_until
from benchmarks.services_memory import memory
from tasks.actors.watchdog import marked
from tasks.system.files import bytes_on_disk
from tasks.system.processes import runs

DOCS = Path("docs/platform.md")
STEP = "timing_s/step"
EVERY = 20
PATIENCE = 3600
DISKS = {"runs": ("runs",), "mlflow": ("mlflow.db", "mlruns"), "prefect": ("prefect",), "temporary": ("temporary",)}
"""Column -> what it is in the folder."""
COLUMNS = {
    "iteration": "Iteration",
    "step_s": "Its seconds",
    "driver_mib": "Driver, MiB",
    "all_mib": "All processes, MiB",
    "files": "The driver's open files",
    "runs_mb": "runs/, MB",
    "mlflow_mb": "MLflow, MB",
    "prefect_mb": "Prefect, MB",
    "temporary_mb": "Temporary files, MB",
}


def measured(folder: Path, driver: psutil.Popen, steps: dict[int, float], since: int) -> dict[str, Any]:
    """A row of the table.

    Args:
        steps: iteration -> its seconds.
        since: iterations after this one are in the median.
    """
    disks = {f"{name}_mb": sum(bytes_on_disk(folder / part) for part in parts) for name, parts in DISKS.items()}
    family = {*marked(str(folder), MARK)}
    return {
        "iteration": max(steps),
        "step_s": round(statistics.median(seconds for step, seconds in steps.items() if step > since), 2),
        "driver_mib": memory(driver, "Pss") >> 10,
        "all_mib": sum(memory(process, "Pss") for process in family) >> 10,
        "files": driver.num_fds(),
        **{name: round(size / 1e6, 1) for name, size in disks.items()},
    }


@ending_at_sigterm()
def train(folder: Path, iterations: int, rows: int, log: Path) -> None:
    """Train, and log a row at each of so many parts."""
    paced = {"total_training_steps": iterations, "test_freq": EVERY, "save_freq": EVERY}
    workspace(folder, {"trainer": paced})
    (folder / "temporary").mkdir()
    away = ("PREFECT_API", "MLFLOW_TRACKING", "RAY_")  # no server of the user's: the run has its own
    environment = {name: value for name, value in os.environ.items() if not name.startswith(away)}
    environment |= {"PREFECT_HOME": str(folder / "prefect"), "TMPDIR": str(folder / "temporary"), "RAY_TMPDIR": "/tmp"}
    environment |= {"PYTHONPATH": import_path(ROOT), "PREFECT_LOGGING_LEVEL": "WARNING", MARK: str(folder)}
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    client.search_experiments()  # the database is made now, so that the run and this never make it together
    command = [sys.executable, "-m", "flows.train", "flow-grpo"]
    with (folder / "output.log").open("w") as output:
        driver = psutil.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        before = 0
        for part in range(1, rows + 1):
            wanted = part * iterations // rows - (part == rows)  # after the last one it ends

            def reached(wanted: int = wanted) -> dict[int, float] | None:
                if not runs(driver):
                    raise SystemExit((folder / "output.log").read_text()[-3000:])
                steps = seconds_of_steps(client)
                return steps if max(steps, default=0) >= wanted else None

            row = measured(folder, driver, wait_until(reached, PATIENCE, f"iteration {wanted}", every=2), before)
            before = row["iteration"]
            print(json.dumps(row), flush=True)
            with log.open("a") as stream:
                stream.write(f"{json.dumps(row)}\n")
    finally:
        driver.terminate()
        driver.wait()


def seconds_of_steps(client: MlflowClient) -> dict[int, float]:
    """Iteration -> seconds, of the only run that this MLflow has; none before its first one."""
    experiment = client.get_experiment_by_name("doubleflow")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    return {point.step: point.value for run in found for point in client.get_metric_history(run.info.run_id, STEP)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a row."""
    lines = [f"| {' | '.join(COLUMNS.values())} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *(f"| {' | '.join(str(row[name]) for name in COLUMNS)} |" for row in rows)])


def main() -> None:
    """Train for long and say what grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--log", type=Path, default=Path("long_run.jsonl"), help="rows are added here")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS}")
    chosen = parser.parse_args()
    if chosen.iterations:
        base = Path(tempfile.mkdtemp(prefix="long-run-"))
        try:
            train(base / "run", chosen.iterations, chosen.rows, chosen.log)
        finally:
            shutil.rmtree(base, ignore_errors=True)
    else:
        refuse_missing(parser, [chosen.log])
    rows = [json.loads(line) for line in chosen.log.read_text().splitlines()]
    print(table(rows))
    if chosen.write:
        put_table(DOCS, "long_run.py", table(rows))


if __name__ == "__main__":
    main()
