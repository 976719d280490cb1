# SPDX-License-Identifier: Apache-2.0
"""How soon a run says that a machine is lost, and how soon it goes on: one that is killed, and one that falls silent.

    python -m benchmarks.lost_machines [--cases killed ...] [--log lost_machines.jsonl] [--write]

Each case is the quickstart's small form on a Ray cluster of three machines on loopback: the head with the driver and
the trainer, and two with room for the reward worker. After an iteration the one that holds it is lost with all of its
processes, by SIGKILL, which closes their connections, or by SIGSTOP, which does not, as a cable that is pulled. Prints
a line of JSON a case, which is also added to `--log`, and a table of the newest line of each, which `--write` puts into
the docs (`--cases` without any: the table alone). The seconds are from that signal on.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from ray._private.authentication import authentication_token_setup as tokens
from ray.cluster_utils import Cluster

from benchmarks.endings import Watched, make_folder, measure_cases
from benchmarks.local_services import ROOT, import_path, wait_until
from tasks.system.processes import runs

DOCS = Path("docs/first-use.md")
PATIENCE = 600
MARK = "DOUBLEFLOW_MEASURED"
CASES = {"killed": signal.SIGKILL, "silent": signal.SIGSTOP}
SETTINGS = (
    "reward.functions.ocr.num_cpus=2",
    "actor_rollout_ref.rollout.num_actors=3",
    "trainer.total_training_steps=6",
)
KINDS = ("TrainerRank", "RolloutWorker", "RewardWorker")


@contextmanager
def three_machines(folder: str) -> Iterator[Cluster]:
    """A head that has no room for the reward, and two that have none for a trainer rank."""
    os.environ["RAY_TMPDIR"] = folder
    tokens.enable_token_auth_by_default()
    tokens.ensure_token_if_auth_enabled()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=2, memory=0)
        yield made
    finally:
        made.shutdown()


def family(node: Any) -> list[psutil.Process]:
    """All processes of a machine of the cluster."""
    own = [psutil.Process(info.process.pid) for kind in node.all_processes.values() for info in kind]
    return [member for process in own for member in [process, *process.children(recursive=True)]]


def held(members: Sequence[psutil.Process]) -> list[str]:
    """The run's actors among these."""
    titles = [" ".join(member.cmdline()) for member in members if runs(member)]
    return [kind for kind in KINDS for title in titles if f"ray::{kind}" in title]


def measure(name: str, base: Path) -> dict[str, Any]:
    """Lose one machine, and tell what was said of it."""
    folder = base / name
    make_folder(folder, ROOT)
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary, three_machines(temporary) as cluster:
        own = {"PREFECT_HOME": str(folder / ".prefect"), "PYTHONPATH": import_path(ROOT), "PYTHONUNBUFFERED": "1"}
        environment = os.environ | own | {MARK: str(folder), "RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "token"}
        changes = [word for setting in SETTINGS for word in ("--set", setting)]
        command = [sys.executable, "-m", "flows.train", "quickstart", *changes]
        watched = Watched.started(command, folder, environment)
        process = watched.process
        members: list[psutil.Process] = []
        try:
            wait_until(lambda: not runs(process) or _said(watched, "iteration 1/"), PATIENCE, "iteration 1", every=0.1)
            watched.refuse_ended("a machine was lost")
            nodes = [family(node) for node in cluster.worker_nodes]
            members = next(found for found in nodes if "RewardWorker" in held(found))
            with_it, load, begun = held(members), os.getloadavg()[0], time.monotonic()
            for member in members:
                member.send_signal(CASES[name])
            code = process.wait(PATIENCE)
            ended = time.monotonic()
        finally:
            for member in {*watched.family(), *members}:
                with suppress(psutil.Error):
                    member.kill()
    after = [(moment - begun, line) for moment, line in watched.lines if line.strip() and moment >= begun]
    back = _first([*reversed(after)], "is back")
    return {
        "case": name,
        "load": round(load, 1),
        "held": ", ".join(with_it),
        "lost_s": _first(after, "machine lost"),
        "back_s": back,
        "on_s": _first([entry for entry in after if back is not None and entry[0] > back], "iteration "),
        "ended_s": round(ended - begun, 1),
        "code": code,
        "said": [f"{moment:.1f} {line}" for moment, line in after][-30:],
    }


def _said(watched: Watched, text: str) -> bool:
    return any(text in line for _, line in watched.lines)


def _first(lines: Sequence[tuple[float, str]], text: str) -> float | None:
    return next((round(moment, 1) for moment, line in lines if text in line), None)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a case."""
    lines = [
        '| The machine | Load | Held | Seconds to "machine lost" | Until all are back | Until an iteration is done '
        "| Exit code |",
        "|---|---|---|---|---|---|---|",
    ]
    names = ("case", "load", "held", "lost_s", "back_s", "on_s", "code")
    return "\n".join([*lines, *(f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows)])


def main() -> None:
    """Measure the cases."""
    measure_cases("lost_machines.py", __doc__, CASES, measure, table, DOCS)


if __name__ == "__main__":
    main()
