# SPDX-License-Identifier: Apache-2.0
"""How many processes `make up` keeps, and how much memory they take when nothing runs.

    python -m benchmarks.services_memory [--wait 20] [--repository PATH] [--write]

Starts the servers and the worker in a temporary folder on ports of their own, waits, and ends them. The memory is PSS
(/proc/<pid>/smaps_rollup): a page that several processes share counts in parts, so the sum is what they take together.
RSS, which counts it for each, stands beside it. `--write` puts the table into the docs; `--repository` measures other
code, as a worktree of another commit.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.docs import put_table
from benchmarks.endings import MARK
from benchmarks.local_services import ROOT, ending_at_sigterm, import_path
from tasks.actors.watchdog import marked
from tasks.system.ports import free_port

DOCS = Path("docs/first-use.md")
NAMES = {
    "logs": "service_log.py",
    "Prefect's server": "prefect server",
    "MLflow's server": "mlflow",
    "worker": "prefect worker",
}
"""What stands in the command line of the process that leads a session; the first that does counts."""


def memory(process: psutil.Process, kind: str) -> int:
    """KiB of it, `Pss` or `Rss`; 0 once it is gone."""
    with suppress(OSError):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))
    return 0


def name_of(process: psutil.Process) -> str:
    """Which service it belongs to, by the process that leads its session."""
    words = " ".join(psutil.Process(os.getsid(process.pid)).cmdline())
    return next((name for name, part in NAMES.items() if part in words), words)


def table(folder: Path) -> str:
    """One line a service, of all processes that carry the folder's mark."""
    found: dict[str, list[psutil.Process]] = {}
    for process in {*marked(str(folder), MARK)}:
        with suppress(psutil.Error, ProcessLookupError):
            found.setdefault(name_of(process), []).append(process)
    lines = ["| Of `make up` | Processes | PSS, MiB | RSS, MiB |", "|---|---|---|---|"]
    total = [0, 0, 0]
    for name, processes in sorted(found.items()):
        row = [len(processes), *(sum(memory(p, kind) for p in processes) // 1024 for kind in ("Pss", "Rss"))]
        total = [a + b for a, b in zip(total, row, strict=True)]
        lines.append(f"| {name} | {' | '.join(map(str, row))} |")
    return "\n".join([*lines, f"| all | {' | '.join(map(str, total))} |"])


def show_each(folder: Path) -> None:
    """A process a line."""
    for process in sorted({*marked(str(folder), MARK)}, key=lambda one: one.pid):
        with suppress(psutil.Error):
            words = " ".join(process.cmdline()).replace(sys.prefix, "")[:120]
            print(f"{process.pid:8} below {process.ppid():8} {memory(process, 'Pss') // 1024:6} MiB  {words}")


@ending_at_sigterm()
def main() -> None:
    """Start, wait, measure, end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", type=float, default=20, help="seconds after `up` has ended")
    parser.add_argument("--repository", type=Path, default=ROOT)
    parser.add_argument("--each", action="store_true", help="a line for each process, too")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS}")
    chosen = parser.parse_args()
    folder, repository = Path(tempfile.mkdtemp(prefix="services-")), chosen.repository.resolve()
    for name in ("flows", "tasks", "models", "prefect.yaml"):
        (folder / name).symlink_to(repository / name)
    environment = os.environ | {
        "PREFECT_HOME": str(folder / ".prefect"),
        "PYTHONPATH": import_path(repository),
        MARK: str(folder),
    }
    services = [sys.executable, "-m", "flows.services"]
    ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]
    try:
        hidden = subprocess.DEVNULL  # it prints the servers' secrets
        subprocess.run([*services, "up", *ports], cwd=folder, env=environment, check=True, stdout=hidden)
        time.sleep(chosen.wait)
        found = table(folder)
        if chosen.each:
            show_each(folder)
    finally:
        subprocess.run([*services, "down"], cwd=folder, env=environment, check=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(found)
    if chosen.write:
        put_table(DOCS, "services_memory.py", found)


if __name__ == "__main__":
    main()
