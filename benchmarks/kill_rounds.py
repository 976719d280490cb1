# SPDX-License-Identifier: Apache-2.0
"""Kill a part of a run at a random moment, start the same command again, and compare with a run that nothing disturbed.

    python -m benchmarks.kill_rounds [--rounds 1] [--victims driver ...] [--seed 0] [--log rounds.jsonl] [--missing]

Each round runs `flow-grpo` in small on a Prefect and an MLflow server of its own, in a temporary folder, and
kills one victim with SIGKILL: the driver, an actor of each kind, Ray's head (its GCS) or its raylet, the MLflow or the
Prefect server, or the worker. `disk` is no process: the run's folder is a file system of its own (only root may mount
one) that becomes full until the run has ended. The moment is random within a stage, and the rounds take the stages in
turn. Servers come back on the same port with the same database. Afterwards the weights and the MLflow history must be
those of the undisturbed run to the last bit, every checkpoint whole, and no stage done twice that had been kept.
Prints a line a round, which is also added to `--log`, and a table of all rounds in the log (`--rounds 0` the table
alone), which `--write` puts into the docs; the exit code is 1 if a round differs, or if a victim was in no round of a
stage there to be killed.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import yaml

from benchmarks.docs import put_table, refuse_missing
from benchmarks.failures import refuse_failed
from benchmarks.local_services import ROOT, Services, ending_at_sigterm, serving, wait_until
from benchmarks.logs import rows_in
from benchmarks.run_state import (
    STAGES,
    WRITING,
    Finished,
    Outcome,
    being_written,
    iterations,
    logged,
    lost_seconds,
    outcome,
    stage_now,
    status,
)
from tasks.config.overrides import merged
from tasks.config.tree import TrainConfig
from tasks.system.processes import runs, wait_until_ended

DOCS = Path("docs/platform.md")
FILLER = "filler"
ACTORS = {"rollout": "ray::RolloutWorker", "reward": "ray::RewardWorker", "trainer": "ray::TrainerRank"}
DAEMONS = {"ray-head": "gcs_server", "raylet": "raylet"}
VICTIMS = ("driver", *ACTORS, *DAEMONS, "mlflow", "prefect", "worker", "disk")

MOMENT_SECONDS = {"starting": 15.0, "rollout": 0.6, "reward": 0.2, "update": 0.8, "writing": 0.1, "record": 0.8}
"""About how long each is; the kill comes at a random moment of it, or soon after."""
SMALL: dict[str, Any] = {
    "data": {"train_batch_size": 4},
    "actor_rollout_ref": {
        "rollout": {
            "n": 4,
            "micro_batch_size": 4,
            "pipeline": {"num_inference_steps": 4},
            "algo": {"sde_window_range": [0, 2]},
            "val_kwargs": {"n": 1, "max_prompts": 8},
        },
        "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 4},
    },
    "trainer": {"total_training_steps": 4, "test_freq": 2},
    "tracking": {"max_outage_s": 20},  # a round ends with the run, which would wait ten minutes for its MLflow
}


# ---- victims


def processes_of(driver: psutil.Process, victim: str) -> list[psutil.Process]:
    """The processes of that kind below a driver; none if they are not there yet."""
    if victim == "driver":
        return [driver]
    found = []
    for process in driver.children(recursive=True):
        try:
            title, name = " ".join(process.cmdline()), process.name()
        except psutil.NoSuchProcess:
            continue
        if (victim in ACTORS and title.startswith(ACTORS[victim])) or name == DAEMONS.get(victim):
            found.append(process)
    return found


# ---- rounds


@dataclass(frozen=True)
class Round:
    """One kill and what came of it.

    Attributes:
        iteration, stage: in which it came.
        save_freq: of the run.
        found: whether there was such a process at that moment.
        died: whether the run did not end well; else it never noticed, or Ray repaired it.
        lost_s: see `lost_seconds`; 0 where the run did not die.
        redone: stages that were done again though they were kept.
        left_over: processes of the run that were alive a minute after its driver had gone.
        difference: from the undisturbed run, in words.
    """

    victim: str
    iteration: int
    stage: str
    save_freq: int
    found: bool
    died: bool
    lost_s: float
    redone: list[str]
    left_over: list[str]
    difference: str | None

    @property
    def equal(self) -> bool:
        """As if nothing had happened, and nothing done in vain."""
        return self.difference is None and not self.redone and not self.left_over


def play(both: Services, victim: str, stage: str, folder: Path, expected: Outcome) -> Round:
    """Start a run, kill the victim at a random moment of a stage, start the run again and compare."""
    save_freq = random.choice([1, 2])
    workspace(folder, {"trainer": {"save_freq": save_freq}})
    with small_disk(folder / "runs") if victim == "disk" else nullcontext():
        return _play(both, victim, stage, folder, expected, save_freq)


def _play(both: Services, victim: str, stage: str, folder: Path, expected: Outcome, save_freq: int) -> Round:
    if victim == "worker":
        both.start("worker")
    driver = start_run(both, folder, by_worker=victim == "worker")
    iteration = random.randint(1, SMALL["trainer"]["total_training_steps"])

    def begun() -> bool:
        kind = STAGES.get(stage)
        there = logged(folder, both.client) >= iteration - 1 if kind is None else iteration in iterations(folder, kind)
        there = iteration in being_written(folder) if stage == WRITING else there
        return stage == "starting" or there or logged(folder, both.client) >= iteration or not runs(driver)

    wait_until(begun, 400, f"{stage} of iteration {iteration}", every=0.05)
    if victim in ACTORS or victim in DAEMONS:  # while a run starts they are not there yet
        wait_until(lambda: not runs(driver) or processes_of(driver, victim), 400, f"a process to kill: {victim}")
    time.sleep(random.uniform(0, MOMENT_SECONDS[stage]))
    family = [driver, *driver.children(recursive=True)] if runs(driver) else []
    candidates = processes_of(driver, victim) if family else []
    moment, lost = stage_now(folder, both.client), lost_seconds(folder)
    if victim in both.running:
        both.kill(victim)
    elif victim == "disk":
        fill(folder / "runs")
    elif candidates:
        random.choice(candidates).kill()
    found = bool(family) and (bool(candidates) or victim in ("mlflow", "prefect", "worker", "disk"))
    wait_until(lambda: not runs(driver), 400, "the driver's end")
    left_over = [process.name() for process in wait_until_ended(family, 60)]
    (folder / "runs" / FILLER).unlink(missing_ok=True)
    for name in both.ports:
        if name not in both.running:
            both.start(name)
    died = status(folder, both.client) != "FINISHED"
    finished = Finished.of(folder, both.client)
    again = both.python("-m", "flows.train", "flow-grpo", folder=folder).wait(600)
    if again:
        difference, redone = f"not continued: {(folder / 'output.log').read_text()[-1500:]}", []
    else:
        difference, redone = expected.difference(outcome(folder, both.client)), finished.repeated(folder, both.client)
    return Round(victim, *moment, save_freq, found, died, lost if died else 0.0, redone, left_over, difference)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 256 MiB at a new folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room in a file system."""
    with (folder / FILLER).open("wb") as filler, suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
            filler.flush()


def workspace(folder: Path, changes: dict[str, Any]) -> None:
    """A folder with the recipe's small form, the project's code and its data."""
    folder.mkdir(parents=True)
    for name in ("flows", "tasks", "models", "data"):
        (folder / name).symlink_to(ROOT / name)
    project = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (recipe,) = (entry for entry in project["deployments"] if entry["name"] == "flow-grpo")
    small = merged(recipe["parameters"]["config"], SMALL, TrainConfig)
    recipe["parameters"]["config"] = merged(small, changes, TrainConfig)
    (folder / "prefect.yaml").write_text(yaml.safe_dump(project | {"deployments": [recipe], "definitions": {}}))


def start_run(both: Services, folder: Path, by_worker: bool) -> psutil.Process:
    """The process of a run in the folder: of the command, or of a deployment that the worker has taken."""
    if not by_worker:
        return psutil.Process(both.python("-m", "flows.train", "flow-grpo", folder=folder).pid)
    both.environment["DOUBLEFLOW_HOME"] = str(folder)
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    for command in (["deploy", "--all"], ["deployment", "run", "train/flow-grpo"]):
        subprocess.run([*prefect, *command], cwd=folder, env=both.environment, check=True, capture_output=True)
    own = psutil.Process(both.running["worker"].pid)
    return wait_until(lambda: own.children(), 120, "the worker's flow run")[0]


def table(rounds: list[dict[str, Any]]) -> str:
    """One line a victim: its rounds, those without a difference, in which stages, and the work that was lost."""
    lines = [
        "| Killed | Rounds | Equal | Stages | Run died | Lost seconds, median (most) |",
        "|---|---|---|---|---|---|",
    ]
    for victim, found in pd.DataFrame(rounds).query("found").groupby("victim"):
        stages = ", ".join(f"{stage} {count}" for stage, count in found["stage"].value_counts().items())
        lost = found.loc[found["died"], "lost_s"]
        seconds = f"{lost.median():.1f} ({lost.max():.1f})" if len(lost) else "none"
        lines.append(
            f"| {victim} | {len(found)} | {found['equal'].sum()} | {stages} | {found['died'].sum()} | {seconds} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Play the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="of each victim")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--log", type=Path, default=Path("kill_rounds.jsonl"), help="every round's line is added here")
    parser.add_argument("--missing", action="store_true", help="leave out a victim's stages that the log holds already")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS}")
    chosen = parser.parse_args()
    random.seed(chosen.seed)
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    if chosen.rounds:
        play_all(chosen.rounds, chosen.victims, chosen.log, chosen.missing)
    else:
        refuse_missing(parser, [chosen.log])
    rounds = rows_in(chosen.log)
    print(table(rounds))
    if chosen.write:
        put_table(DOCS, "kill_rounds.py", table(rounds))
    refuse_failed(faults(rounds))


def faults(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rounds of a log do not show, each in words."""
    told = []
    for entry in rounds:
        if not entry["equal"]:
            said = entry["difference"] or f"done twice: {entry['redone']}; left over: {entry['left_over']}"
            told.append(f"{entry['victim']} killed in {entry['stage']}: {said}")
    killed = {(entry["victim"], entry["stage"]) for entry in rounds if entry["found"]}
    played = dict.fromkeys((entry["victim"], entry["stage"]) for entry in rounds)
    return told + [
        f"no {victim} was there to kill in {stage}" for victim, stage in played if (victim, stage) not in killed
    ]


@ending_at_sigterm()
def play_all(rounds: int, victims: Sequence[str], log: Path, missing: bool) -> None:
    """So many rounds of each victim, after a run that nothing disturbs; every round's line goes to the log.

    Args:
        missing: leave out the stages in which a victim was found and killed before.
    """
    done = {(entry["victim"], entry["stage"]) for entry in rows_in(log) if entry["found"] and missing}
    base = Path(tempfile.mkdtemp(prefix="kill-rounds-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        both = stack.enter_context(serving(Services(base)))
        workspace(base / "undisturbed", {})
        if both.python("-m", "flows.train", "flow-grpo", folder=base / "undisturbed").wait(600):
            raise SystemExit((base / "undisturbed" / "output.log").read_text()[-3000:])
        expected = outcome(base / "undisturbed", both.client)
        stages = random.sample(list(MOMENT_SECONDS), len(MOMENT_SECONDS))
        for number, (place, victim) in itertools.product(range(rounds), enumerate(victims)):
            stage = stages[(number + place) % len(stages)]  # six rounds, and a victim has had every stage
            if (victim, stage) in done:
                continue
            result = play(both, victim, stage, base / f"{victim}-{number}", expected)
            line = json.dumps(vars(result) | {"equal": result.equal})
            print(line, flush=True)
            with log.open("a") as stream:
                stream.write(f"{line}\n")


if __name__ == "__main__":
    main()
