# SPDX-License-Identifier: Apache-2.0
"""How a command heeds SIGTERM, wherever it comes: what it prints, how soon, and how soon all of its processes are gone.

    python -m benchmarks.endings [--moments update ...] [--signal TERM] [--log endings.jsonl] [--write]
        [--repository PATH] [--py-spy PROGRAM]

Each moment is a command in a temporary folder, most of them a small form of the quickstart on a Prefect server and a
Ray cluster of the run's own, and a sign by which its processes show that it is there. `reproduce` and `compare` get a
run that is recorded beforehand, in a repository of its own. Prints a line of JSON a moment,
which is also added to `--log`, and a table of the newest line of each moment in the log, which `--write` puts into the
docs (`--moments` without any: the table alone). `--repository` measures other code, as a worktree of another commit;
`--py-spy` prints where the driver's main thread is each half second after the signal.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import yaml

from benchmarks.docs import put_table, refuse_missing
from benchmarks.failures import NotMeasured, refuse_failed
from benchmarks.kill_rounds import SMALL
from benchmarks.local_services import ROOT, ending_at_sigterm, import_path, wait_until
from benchmarks.logs import rows_in
from tasks.actors.watchdog import marked
from tasks.config.overrides import merged
from tasks.config.tree import TrainConfig
from tasks.system.processes import runs

DOCS = Path("docs/platform.md")
PATIENCE = 600
LATEST = 90
"""Seconds after the signal at which what still runs is killed, and called so."""
MARK = "DOUBLEFLOW_MEASURED"
TRAIN = ("-m", "flows.train", "quickstart")
SWEEP = ("-m", "flows.sweep", "small")
Sign = Callable[["Watched"], Any]


@dataclass
class Watched:
    """A command, and all that it starts."""

    process: psutil.Popen
    folder: Path
    lines: list[tuple[float, str]]

    @classmethod
    def started(
        cls, command: Sequence[str], folder: Path, environment: Mapping[str, str], cwd: Path | None = None
    ) -> "Watched":
        """The command in a session of its own, in its folder unless `cwd` is given; each line is read as it comes."""
        process = psutil.Popen(
            command,
            cwd=cwd or folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        watched = cls(process, folder, [])
        Thread(target=watched._read, daemon=True).start()
        return watched

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def refuse_ended(self, what: str) -> None:
        """Raise NotMeasured, with the command's last line, where it has ended before what is waited for."""
        if not runs(self.process):
            code = self.process.wait()
            time.sleep(0.5)  # until the last lines are read
            said = [line for _, line in self.lines if line.strip()][-1:]
            raise NotMeasured(f"the command ended with exit code {code} before {what}: {''.join(said)}")

    def family(self) -> list[psutil.Process]:
        """It and everything that carries its mark, or is below something that does."""
        found = {*marked(str(self.folder), MARK)}
        with suppress(psutil.Error):
            found |= {*self.process.children(recursive=True)}
        return list(filter(runs, found))

    def titles(self) -> list[str]:
        """Of the processes below it."""
        found = []
        for process in self.process.children(recursive=True):
            with suppress(psutil.Error):
                found.append(" ".join(process.cmdline()) or process.name())
        return found

    def maps(self, part: str) -> bool:
        """Has it loaded a library?"""
        return part in Path(f"/proc/{self.process.pid}/maps").read_text()


def cpu_seconds(process: psutil.Process) -> float:
    """What the process itself has taken so far; 0 once it is gone."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def titled(*parts: str) -> Sign:
    """A process below the command has one of these in its title: Ray's actors have the method there that runs."""
    return lambda watched: any(part in title for title in watched.titles() for part in parts)


def has_file(pattern: str) -> Sign:
    """The folder has such a file."""
    return lambda watched: any(watched.folder.glob(pattern))


def after(seconds: float, sign: Sign) -> Sign:
    """So long after the sign."""

    def later(watched: Watched) -> bool:
        if not sign(watched):
            return False
        time.sleep(seconds)
        return True

    return later


def at_once(watched: Watched) -> bool:
    """As soon as it is there."""
    return True


@dataclass(frozen=True)
class Moment:
    """A command, what it finds around it, and the sign that it is there."""

    command: Sequence[str]
    sign: Sign
    environment: tuple[str, ...] = ()

    @property
    def needs_run(self) -> bool:
        """Is it about a recorded run?"""
        return RUN in self.command


UPDATE = titled("ray::TrainerRank.update")
DRAWING = titled("ray::RolloutWorker.generate", "ray::RewardWorker.score")
RUN = "the recorded run's id"
REPRODUCE = ("-m", "flows.reproduce", RUN, "--iterations", "1")
COMPARE = ("-m", "flows.compare", RUN, RUN)
MOMENTS: dict[str, Moment] = {
    "imports": Moment(TRAIN, after(0.5, lambda watched: watched.maps("libtorch"))),
    "Prefect's server starts": Moment(TRAIN, titled("prefect.server")),
    "Ray starts": Moment(TRAIN, titled("gcs_server")),
    "Ray is there": Moment(TRAIN, titled("raylet/raylet")),
    "models load": Moment(TRAIN, titled("ray::TrainerRank", "ray::RolloutWorker")),
    "models load, later": Moment(TRAIN, after(3, titled("ray::TrainerRank.initialize"))),
    "validation 0": Moment(TRAIN, DRAWING),
    "rollout": Moment(TRAIN, after(0.1, has_file("runs/*/stages/rollout/iter_000001"))),
    "update": Moment(TRAIN, UPDATE),
    "checkpoint": Moment(TRAIN, has_file("runs/*/checkpoints/.writing-*")),
    "later update": Moment(TRAIN, lambda watched: UPDATE(watched) and has_file("runs/*/checkpoints/iter_*2")(watched)),
    "end": Moment(TRAIN, has_file("runs/*/weights")),
    "no MLflow yet": Moment(TRAIN, after(4, at_once), ("silent MLflow",)),
    "sweep begins": Moment(SWEEP, titled("raylet/raylet")),
    "sweep, updates": Moment(SWEEP, UPDATE),
    "validate": Moment(("-m", "flows.validate", "quickstart"), titled("ray::RolloutWorker")),
    "validate, pictures": Moment(("-m", "flows.validate", "quickstart"), DRAWING),
    "reproduce, data": Moment(REPRODUCE, titled("-m dvc")),
    "reproduce, models load": Moment(REPRODUCE, titled("ray::TrainerRank")),
    "reproduce, update": Moment(REPRODUCE, UPDATE),
    "compare begins": Moment(COMPARE, titled("prefect.server")),
    "compare, page": Moment(COMPARE, has_file("runs/compare-*.html")),
}


@contextmanager
def silent_server() -> Iterator[str]:
    """Somebody who listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def make_folder(folder: Path, repository: Path) -> None:
    """The quickstart's small form and a sweep of two trials, with a repository's code and this one's data."""
    folder.mkdir()
    for name in ("flows", "tasks", "models"):
        (folder / name).symlink_to(repository / name)
    (folder / "data").symlink_to(ROOT / "data")
    project = yaml.safe_load((repository / "prefect.yaml").read_text())
    found = {entry["name"]: entry for entry in project["deployments"]}
    quickstart, sweep = found["quickstart"], found["sweep"]
    config = merged(quickstart["parameters"]["config"], SMALL, TrainConfig)
    quickstart["parameters"]["config"] = config
    space = {"actor_rollout_ref.actor.optim.lr": {"choices": [1e-3, 1e-4]}}
    search = {"name": "small", "sampler": "grid", "pruner": "none", "parallel": 2, "space": space}
    sweep |= {"name": "small", "parameters": {"config": config, "search": search}}
    deployments = {"name": "doubleflow", "deployments": [quickstart, sweep]}
    (folder / "prefect.yaml").write_text(yaml.safe_dump(deployments))


@cache
def recorded_run(base: Path, repository: Path) -> tuple[Path, str]:
    """A repository with a run of one iteration, its data under DVC; its folder, and the run's id in MLflow."""
    folder = base / "recorded"
    make_folder(folder, repository)
    for name in ("flows", "tasks", "models"):
        (folder / name).unlink()
        shutil.copytree(repository / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "data").unlink()
    (folder / "data").mkdir()
    data = ["data/prompts.parquet", "data/embeddings", "data/base_model"]
    subprocess.run(["cp", "-r", *data, str(folder / "data")], cwd=ROOT, check=True)
    (folder / ".gitignore").write_text("runs\nmlruns\nmlflow.db\n__pycache__\n.prefect\n")
    python, git = (sys.executable, "-m"), ("git", "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    small = ("--set", "trainer.total_training_steps=1", "--set", "trainer.val_before_train=false")
    for command in (
        (*git, "init", "--quiet"),
        (*python, "dvc", "init", "--quiet"),
        (*python, "dvc", "add", "--quiet", *data),
        (*git, "add", "."),
        (*git, "commit", "--quiet", "--message", "all"),
        (*python, "flows.train", "quickstart", *small),
    ):
        environment = os.environ | {"PREFECT_HOME": str(folder / ".prefect"), "PYTHONPATH": import_path(folder)}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    (record,) = folder.glob("runs/*/run.json")
    return folder, json.loads(record.read_text())["mlflow_run_id"]


def measure(name: str, base: Path, number: int, repository: Path, spy: str | None) -> dict[str, Any]:
    """End one command, and tell what it did."""
    moment, folder = MOMENTS[name], base / name.replace(" ", "-").replace("'", "").replace(",", "")
    run, code = "", repository
    if moment.needs_run:
        folder, run = recorded_run(base, repository)
        code = folder
    else:
        make_folder(folder, repository)
    with silent_server() as silent:
        environment = os.environ | {
            "PREFECT_HOME": str(folder / ".prefect"),
            "PYTHONPATH": import_path(code),
            "PYTHONUNBUFFERED": "1",
            MARK: str(folder),
        }
        if "silent MLflow" in moment.environment:
            environment["MLFLOW_TRACKING_URI"] = silent
        command = [sys.executable, *(run if word == RUN else word for word in moment.command)]
        watched = Watched.started(command, folder, environment)
        process = watched.process
        try:
            wait_until(lambda: not runs(process) or moment.sign(watched), PATIENCE, name, every=0.15)
            watched.refuse_ended("its moment")
            return _end(name, number, watched, spy)
        finally:
            for member in watched.family():
                with suppress(psutil.Error):
                    member.kill()


def _end(name: str, number: int, watched: Watched, spy: str | None) -> dict[str, Any]:
    """Send the signal, and wait for all of the command's processes."""
    process, before = watched.process, len(watched.lines)
    load, begun, worked = os.getloadavg()[0], time.monotonic(), cpu_seconds(process)
    process.send_signal(number)
    ended, spent = 0.0, worked
    left = watched.family()
    while left and time.monotonic() - begun < LATEST:
        if spy and runs(process):
            print(f"--- {time.monotonic() - begun:.1f} s", flush=True)
            found = subprocess.run([spy, "dump", "--pid", str(process.pid)], capture_output=True, text=True)
            print("\n".join(found.stdout.split("\n\n")[:2][-1].splitlines()[:22]), flush=True)
        if not ended and not runs(process):
            ended = time.monotonic() - begun
        spent = max(spent, cpu_seconds(process))
        time.sleep(0.5 if spy else 0.1)
        left = watched.family() if ended else left
    gone = time.monotonic() - begun
    ended = ended or (0.0 if runs(process) else gone)  # it may be gone before the first look
    said = [(moment - begun, line) for moment, line in watched.lines[before:] if line.strip()]
    sentence = next((moment for moment, line in said if line.startswith("stopped by")), None)
    return {
        "moment": name,
        "load": round(load, 1),
        "code": None if runs(process) else process.wait(5),
        "lines": len(said),
        "sentence_s": sentence and round(sentence, 1),
        "ended_s": round(ended, 1),
        "gone_s": round(gone, 1),
        "cpu_s": round(spent - worked, 1),
        "left": [member.name() for member in left if runs(member)],
        "said": [f"{moment:.1f} {line}" for moment, line in said][-40:],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a moment."""
    lines = [
        "| Signal during | Load | Lines | Exit code | Seconds to the sentence | To its end | All gone | CPU seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = ("moment", "load", "lines", "code", "sentence_s", "ended_s", "gone_s", "cpu_s")
    return "\n".join([*lines, *(f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows)])


@ending_at_sigterm()
def log_each(names: Iterable[str], measure: Callable[[str, Path], dict[str, Any]], log: Path) -> list[str]:
    """Measure one after the other in a temporary folder; each line of JSON is printed and logged as it comes.

    Returns:
        A text for each that could not be measured, of which the log has no line.
    """
    base, failed = Path(tempfile.mkdtemp(prefix=f"{log.stem}-")), list[str]()
    try:
        for name in names:
            try:
                line = json.dumps(measure(name, base))
            except (NotMeasured, TimeoutError) as error:
                failed.append(f"{name}: {error}")
                print(failed[-1], flush=True)
                continue
            print(line, flush=True)
            with log.open("a") as stream:
                stream.write(f"{line}\n")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return failed


def newest_rows(log: Path, key: str, order: Iterable[str]) -> list[dict[str, Any]]:
    """The log's newest line of each name under `key`, in this order; those that it has not are left out."""
    rows = {row[key]: row for row in rows_in(log)}
    return [rows[name] for name in order if name in rows]


def measure_cases(
    script: str,
    description: str | None,
    cases: Iterable[str],
    measure: Callable[[str, Path], dict[str, Any]],
    table: Callable[[Sequence[dict[str, Any]]], str],
    page: Path,
) -> None:
    """The command of a benchmark whose rows are cases: those that are asked for are measured, and all that the log has
    are printed as a table, which goes to the page if that is asked for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=[*cases], default=[*cases])
    log = Path(script).with_suffix(".jsonl")
    parser.add_argument("--log", type=Path, default=log, help="every case's line is added here")
    parser.add_argument("--write", action="store_true", help=f"put the table into {page}")
    chosen = parser.parse_args()
    if not chosen.cases:
        refuse_missing(parser, [chosen.log])
    failed = log_each(chosen.cases, measure, chosen.log)
    rows = newest_rows(chosen.log, "case", cases)
    print(table(rows))
    if chosen.write:
        put_table(page, script, table(rows))
    refuse_failed(failed)


def main() -> None:
    """Measure the moments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", nargs="*", choices=[*MOMENTS], default=[*MOMENTS])
    parser.add_argument("--signal", choices=["INT", "TERM"], default="TERM")
    parser.add_argument("--repository", type=Path, default=ROOT)
    parser.add_argument("--py-spy", help="the program")
    parser.add_argument("--log", type=Path, default=Path("endings.jsonl"), help="every moment's line is added here")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS}")
    chosen = parser.parse_args()
    if not chosen.moments:
        refuse_missing(parser, [chosen.log])
    number, repository = signal.Signals[f"SIG{chosen.signal}"], chosen.repository.resolve()
    each = partial(measure, number=number, repository=repository, spy=chosen.py_spy)
    failed = log_each(chosen.moments, each, chosen.log)
    rows = newest_rows(chosen.log, "moment", MOMENTS)
    print(table(rows))
    if chosen.write:
        put_table(DOCS, "endings.py", table(rows))
    refuse_failed(failed)


if __name__ == "__main__":
    main()
