# SPDX-License-Identifier: Apache-2.0
"""A recipe on two machines, one of which is killed during an update: how the run ends, and how soon it goes on.

    python -m benchmarks.two_machines RECIPE [--device cuda] [--gpus-per-machine 2] [--set FIELD=VALUE ...]
        [--limit SECONDS] [--log two_machines.jsonl] [--folder DIR]
    python -m benchmarks.two_machines quickstart --device cpu --gpus-per-machine 1   # its small form

The machines are two raylets of one host on loopback, each with GPUs of its own and as many trainer ranks. Once
iteration 2 is done and Ray's title of a rank on the second machine is that of an update, which is iteration 3's, all
processes of that machine get SIGKILL. When the run has ended, the machine is started again as before, and then the same
command. On CUDA the run reads the working folder's data, on the CPU the repository's. Its own files are in `--folder`,
which is made and stays; by default in a temporary one. Prints a line of JSON, which is also added to `--log`, and the
recipe's newest line as a table. After `--limit` seconds all is ended, and the line says what did not come.
"""

import argparse
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from ray._private.authentication import authentication_token_setup as tokens
from ray.cluster_utils import Cluster

from benchmarks.endings import MARK, Watched, log_each, make_folder, newest_rows
from benchmarks.failures import refuse_failed
from benchmarks.local_services import ROOT, import_path, wait_until
from benchmarks.lost_machines import KINDS, family
from benchmarks.run_state import iterations
from tasks.config.errors import ConfigError
from tasks.config.recipes import changed_recipe
from tasks.system.processes import runs, wait_until_ended

BEFORE = 2
"""Iterations that are done when the machine is killed."""
DONE = re.compile(r"iteration (\d+)/\d+: .*?([\d.]+) s\b")
UPDATE = "ray::TrainerRank.update"


def changes(device: str, ranks: int, settings: Sequence[str]) -> list[str]:
    """What makes a recipe a run on two machines of so many ranks; `settings` go before what is set here."""
    trainer: dict[str, Any] = {"device": device, "nnodes": 2, "n_gpus_per_node": ranks, "total_training_steps": 6}
    trainer |= {"save_freq": 1, "test_freq": 0, "val_before_train": "false"}
    rollout: dict[str, Any] = {"num_actors": 2 * ranks, "weight_transport": "object_store"}
    if device == "cuda":
        rollout |= {"placement": "colocated", "weight_transport": "ipc"}
    own = {f"trainer.{name}": value for name, value in trainer.items()}
    own |= {f"actor_rollout_ref.rollout.{name}": value for name, value in rollout.items()}
    own |= {"ray_init.gpu_pool": "null"}  # no other run counts on these GPUs
    given = {setting.partition("=")[0].strip() for setting in settings}
    return [*(f"{name}={value}" for name, value in own.items() if name not in given), *settings]


class Machines:
    """The head, and a second machine that can be killed and come back; each has processors for all rewards."""

    def __init__(self, device: str, gpus: int, rewards: float):
        cpus = max((os.cpu_count() or 1) // 2, math.ceil(rewards))
        store = shutil.disk_usage("/dev/shm").free // 4  # a raylet that is started like this has 150 MiB by default
        self.settings: list[dict[str, Any]] = [{"num_cpus": cpus, "object_store_memory": store} for _ in range(2)]
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(2 * gpus)))).split(",")
        for number, own in enumerate(self.settings if device == "cuda" else []):
            visible = ",".join(seen[number * gpus : (number + 1) * gpus])
            own |= {"num_gpus": gpus, "env_vars": {"CUDA_VISIBLE_DEVICES": visible}}
        self.cluster = Cluster(initialize_head=True, head_node_args=self.settings[0] | {"include_dashboard": False})
        self.second: Any = None

    def start_second(self) -> None:
        """Start the second machine, again where it was killed, and wait until Ray knows it."""
        if self.second is not None:
            self.cluster.remove_node(self.second, allow_graceful=False)  # from the list of those to stop
        self.second = self.cluster.add_node(**self.settings[1])

    def actors(self) -> dict[str, list[str]]:
        """Ray's titles of the run's actors on each machine, with the GPUs that its raylet hands to its processes."""
        found: dict[str, list[str]] = {"head": [], "second": []}
        for name, node in (("head", self.cluster.head_node), ("second", self.second)):
            for member in family(node):
                with suppress(psutil.Error):
                    title, gpus = " ".join(member.cmdline()).strip(), member.environ().get("CUDA_VISIBLE_DEVICES")
                    found[name] += [f"{title}, GPUs {gpus}" for kind in KINDS if f"ray::{kind}" in title]
        return found

    def stop(self) -> None:
        """End both, and what their raylets leave."""
        left: list[psutil.Process] = []
        for node in (self.cluster.head_node, *self.cluster.worker_nodes):
            with suppress(psutil.Error):  # it has just been killed
                left += family(node)
        try:
            self.cluster.shutdown()
        finally:
            kill(left)


def kill(members: Sequence[psutil.Process]) -> None:
    """SIGKILL for all of them; returns when they are gone."""
    for member in members:
        with suppress(psutil.Error):
            member.kill()
    wait_until_ended(members, 30)


@contextmanager
def started(command: Sequence[str], folder: Path, cwd: Path, address: str) -> Iterator[Watched]:
    """The command, with the moment of each of its lines; what is left of it is killed at the block's end."""
    own = {"PREFECT_HOME": f"{folder}/.prefect", "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    own |= {"PYTHONPATH": import_path(ROOT), "PYTHONUNBUFFERED": "1", "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
    watched = Watched.started(command, folder, os.environ | own | {MARK: str(folder)}, cwd)
    try:
        yield watched
    finally:
        kill(watched.family())


def first(watched: Watched, text: str, begun: float) -> float | None:
    """Seconds from a moment to the first line after it that has the text; None where there is none."""
    return next((round(at - begun, 1) for at, line in watched.lines if at >= begun and text in line), None)


def seconds_of(lines: Sequence[tuple[float, str]]) -> dict[int, float]:
    """What each iteration took, as its line says."""
    return {int(found[1]): float(found[2]) for _, line in lines if (found := DONE.match(line))}


def said(watched: Watched, begun: float) -> dict[str, Any]:
    """The seconds of a command's iterations, and its last lines with the seconds since a moment."""
    time.sleep(0.5)  # until the last ones are read
    lines = [f"{at - begun:.1f} {line}" for at, line in watched.lines if line.strip()]
    return {"step_s": seconds_of(watched.lines), "said": lines[-20:]}


def run_twice(row: dict[str, Any], both: Machines, start: Callable[[], Any], folder: Path, over: float) -> None:
    """Kill the second machine below the first run, start it and the run again; what is seen goes into the row."""

    def until(run: Watched, what: str, condition: Callable[[], Any] = lambda: False) -> None:
        """Wait for something, or for the run's end."""
        wait_until(lambda: not runs(run.process) or condition(), max(1.0, over - time.monotonic()), what, every=0.05)

    both.start_second()
    begun = time.monotonic()
    with start() as run:
        try:
            until(run, f"iteration {BEFORE}", lambda: BEFORE in seconds_of(run.lines))
            until(run, "the update after it", lambda: UPDATE in str(both.actors()["second"]))
            row |= {"held": both.actors(), "done": len(seconds_of(run.lines))}
            if not runs(run.process):
                raise RuntimeError("the run ended before an update was seen whose machine could be killed")
            begun = time.monotonic()
            kill(family(both.second))
            until(run, "the run's end")
            row |= {"ended_s": round(time.monotonic() - begun, 1), "code": run.process.wait(5)}
        finally:
            row |= {"first": said(run, begun), "lost_s": first(run, "machine lost", begun)}
    row["checkpoint"] = max(iterations(folder, "checkpoints"), default=0)
    begun = time.monotonic()
    both.start_second()
    row["joined_s"] = round(time.monotonic() - begun, 1)
    begun, following = time.monotonic(), row["done"] + 1
    with start() as run:
        try:
            until(run, "an iteration more", lambda: following in seconds_of(run.lines))
            row |= {"on_s": first(run, f"iteration {following}/", begun), "held_again": both.actors()}
            until(run, "the end of the run that went on")
            row["code_again"] = run.process.wait(5)
        finally:
            row["again"] = said(run, begun)


def measure(chosen: argparse.Namespace, base: Path) -> dict[str, Any]:
    """A call's row."""
    folder, over = (chosen.folder or base / "run").resolve(), time.monotonic() + chosen.limit
    folder.parent.mkdir(parents=True, exist_ok=True)
    if chosen.device == "cpu":
        make_folder(folder, ROOT)
    else:
        folder.mkdir()
    cwd, ranks = folder if chosen.device == "cpu" else Path.cwd(), chosen.gpus_per_machine
    settings = changes(chosen.device, ranks, [f"trainer.default_local_dir={folder}/runs", *chosen.set])
    rewards = changed_recipe(chosen.recipe, settings, cwd / "prefect.yaml").reward.num_cpus
    command = [sys.executable, "-m", "flows.train", chosen.recipe]
    command += [word for setting in settings for word in ("--set", setting)]
    row: dict[str, Any] = {"recipe": chosen.recipe, "device": chosen.device, "ranks": f"2 x {ranks}", "failed": None}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        # Without the second, Ray writes its processes' titles over the environment that `actors` reads.
        os.environ |= {"RAY_TMPDIR": temporary, "SPT_NOENV": "1"}
        tokens.enable_token_auth_by_default()
        tokens.ensure_token_if_auth_enabled()
        both = Machines(chosen.device, ranks, rewards)
        try:
            run_twice(row, both, lambda: started(command, folder, cwd, both.cluster.address), folder, over)
        except (TimeoutError, RuntimeError, psutil.Error) as error:
            row["failed"] = str(error)
        finally:
            both.stop()
    return row | {"load": round(os.getloadavg()[0], 1)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a recipe."""
    lines = [
        '| Recipe | Machines x ranks | Seconds to "machine lost" | To the run\'s end | Exit code | Checkpoint '
        "| The machine is back after | The command is an iteration further after | Exit code |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    names = ("recipe", "ranks", "lost_s", "ended_s", "code", "checkpoint", "joined_s", "on_s", "code_again")
    return "\n".join([*lines, *(f"| {' | '.join(str(row.get(name)) for name in names)} |" for row in rows)])


def failure(row: Mapping[str, Any]) -> str | None:
    """Why a row is not whole, or that the run did not go on; None where all came."""
    if row["failed"]:
        return f"{row['recipe']}: {row['failed']}"
    code = row["code_again"]
    return f"{row['recipe']}: the command that was to go on ended with exit code {code}" if code else None


def main() -> None:
    """Measure a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus-per-machine", type=int, default=2, help="trainer ranks of each; on the CPU processes")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="FIELD=VALUE", help="further changes")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of all")
    parser.add_argument("--folder", type=Path, help="of the run; a new one")
    parser.add_argument("--log", type=Path, default=Path("two_machines.jsonl"), help="the line is added here")
    chosen = parser.parse_args()
    try:
        failed = log_each([chosen.recipe], lambda _, base: measure(chosen, base), chosen.log)
    except ConfigError as error:
        parser.error(str(error))
    rows = newest_rows(chosen.log, "recipe", [chosen.recipe])
    print(table(rows))
    refuse_failed(failed or list(filter(None, map(failure, rows))))


if __name__ == "__main__":
    main()
