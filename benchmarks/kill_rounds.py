"""Kill a part of a run at a random moment, start the same command again, and compare with a run that nothing disturbed.

    python -m benchmarks.kill_rounds [--rounds 1] [--victims driver rollout ...] [--seed 0]

Each round runs a small form of the quickstart on a Prefect and an MLflow server of its own, in a temporary folder, and
kills one victim with SIGKILL: the driver, an actor of each kind, Ray's head (its GCS) or its raylet, the MLflow or the
Prefect server, or the worker. Servers come back on the same port with the same database. Afterwards the weights and
the MLflow history must be those of the undisturbed run to the last bit, and every checkpoint whole. Prints a line a
round and a table of lost work; the exit code is 1 if a round differs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import psutil
import yaml
from mlflow import MlflowClient
from safetensors.torch import load_file

from tasks.checkpoint import CheckpointStore, verify
from tasks.history import RunHistory, comparable
from tasks.tracking import STEP_MARK

ROOT = Path(__file__).resolve().parents[1]
ACTORS = {"rollout": "ray::RolloutActor", "reward": "ray::RewardWorker", "trainer": "ray::TrainerRank"}
DAEMONS = {"ray-head": "gcs_server", "raylet": "raylet"}
VICTIMS = ("driver", *ACTORS, *DAEMONS, "mlflow", "prefect", "worker")
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
    "trainer": {"total_training_steps": 8, "test_freq": 4, "save_freq": 2},
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


# ---- what a run left


@dataclass(frozen=True)
class Outcome:
    """What two runs of the same config must share to the last bit."""

    weights: dict[str, Any]
    history: dict[str, dict[int, float]]
    duplicates: list[str]
    samples: dict[int, pd.DataFrame]

    def difference(self, other: "Outcome") -> str | None:
        """In words; None if there is none."""
        if self.duplicates or other.duplicates:
            return f"steps logged twice: {self.duplicates or other.duplicates}"
        metrics = [name for name in self.history | other.history if self.history.get(name) != other.history.get(name)]
        weights = [n for n in self.weights | other.weights if not (self.weights[n] == other.weights[n]).all()]
        tables = [step for step in self.samples if not self.samples[step].equals(other.samples[step])]
        found = {"metrics": metrics, "weights": weights, "samples": tables}
        return str({name: names[:4] for name, names in found.items() if names}) if any(found.values()) else None


def outcome(folder: Path, client: MlflowClient) -> Outcome:
    """Of the only run in a folder; every checkpoint's digests are checked on the way."""
    (run_dir,) = (path for path in (folder / "runs").iterdir() if (path / "run.json").is_file())
    history = RunHistory(client, json.loads((run_dir / "run.json").read_text())["mlflow_run_id"])
    for checkpoint in (run_dir / "checkpoints").iterdir():
        verify(checkpoint)
    metrics = comparable(history.metrics())
    points = {name: client.get_metric_history(history.run_id, name) for name in metrics}
    return Outcome(
        weights=load_file(run_dir / "weights/transformer/diffusion_pytorch_model.safetensors"),
        history=metrics,
        duplicates=[name for name, found in points.items() if len(found) != len({p.step for p in found})],
        samples={step: history.table("samples", step) for step in history.steps("samples")},
    )


def logged(folder: Path, client: MlflowClient) -> int:
    """The newest iteration in MLflow of the only run in a folder; -1 before the first record."""
    records = list((folder / "runs").glob("*/run.json"))
    if not records:
        return -1
    steps = client.get_metric_history(json.loads(records[0].read_text())["mlflow_run_id"], STEP_MARK)
    return max([int(point.step) for point in steps], default=-1)


def lost_work(folder: Path, client: MlflowClient) -> tuple[int, float]:
    """(iterations in MLflow that have to be done again, seconds since the newest checkpoint or the run's beginning)."""
    records = list((folder / "runs").glob("*/run.json"))
    if not records:
        return 0, 0.0
    store = CheckpointStore(records[0].parent / "checkpoints", keep=9)
    saved = store.iterations()[-1] if store.iterations() else 0
    since = (store.path(saved) if saved else records[0]).stat().st_mtime
    return max(logged(folder, client) - saved, 0), time.time() - since


# ---- servers and rounds


class Services:
    """A Prefect server, an MLflow server and, where asked for, a worker, each of which can be killed and come back."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ports = {"prefect": _free_port(), "mlflow": _free_port()}
        self.environment = os.environ | {
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.ports['prefect']}/api",
            "PREFECT_LOGGING_LEVEL": "WARNING",
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.ports['mlflow']}",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": str(ROOT),
        }
        self.running: dict[str, subprocess.Popen] = {}

    @property
    def client(self) -> MlflowClient:
        """MLflow's own file, which can be read while its server is dead."""
        return MlflowClient(f"sqlite:///{self.folder}/mlflow.db")

    def start(self, name: str) -> None:
        """Start one, and wait until it answers."""
        address = ["--host", "127.0.0.1", "--port", str(self.ports.get(name))]
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        artifacts = ["--default-artifact-root", (self.folder / "mlruns").as_uri(), "--no-serve-artifacts"]
        commands = {
            "prefect": ["prefect", "server", "start", *address],
            "mlflow": ["mlflow", "server", *address, *store, *artifacts, "--workers", "1"],
            "worker": ["prefect", "worker", "start", "--pool", "local"],
        }
        self.running[name] = self.python("-m", *commands[name], folder=self.folder)
        if name in self.ports:
            path = "/api/health" if name == "prefect" else "/health"
            _wait(lambda: _answers(f"http://127.0.0.1:{self.ports[name]}{path}"), 180, f"{name}'s start")

    def kill(self, name: str) -> None:
        """kill -9 of it; of a server also its own workers, of a worker not the flow runs that it started."""
        process = psutil.Process(self.running.pop(name).pid)
        family = [process] if name == "worker" else [process, *process.children(recursive=True)]
        for member in family:
            member.kill()
        psutil.wait_procs(family, timeout=30)

    def python(self, *arguments: str, folder: Path) -> subprocess.Popen:
        """`python ...` in a folder, in a session of its own, its output in a file."""
        with (folder / "output.log").open("a") as log:
            command = [sys.executable, *arguments]
            return subprocess.Popen(
                command, cwd=folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )


@contextmanager
def services(folder: Path) -> Iterator[Services]:
    """Both servers; they end with the block."""
    both = Services(folder)
    try:
        both.start("prefect")
        both.start("mlflow")
        yield both
    finally:
        for name in list(both.running):
            both.kill(name)


@dataclass(frozen=True)
class Round:
    """One kill and what came of it.

    Attributes:
        after: iteration that MLflow had when it came; -1 while the run was starting.
        found: whether there was such a process at that moment.
        lost_iterations, lost_seconds: see `lost_work`.
        left_over: processes of the run that were alive a minute after its driver had gone.
        difference: from the undisturbed run, in words.
    """

    victim: str
    after: int
    found: bool
    lost_iterations: int
    lost_seconds: float
    left_over: list[str]
    difference: str | None


def play(both: Services, victim: str, folder: Path, expected: Outcome) -> Round:
    """Start a run, kill the victim at a random moment, start the run again and compare."""
    workspace(folder)
    if victim == "worker":
        both.start("worker")
    driver = _start_run(both, folder, by_worker=victim == "worker")
    after = random.randint(-1, SMALL["trainer"]["total_training_steps"] - 1)
    _wait(lambda: logged(folder, both.client) >= after or not _alive(driver), 300, f"iteration {after}")
    time.sleep(random.uniform(0, 12 if after < 0 else 3))
    family = [driver, *driver.children(recursive=True)] if _alive(driver) else []
    candidates = processes_of(driver, victim) if family else []
    after, lost = logged(folder, both.client), lost_work(folder, both.client)
    if victim in both.running:
        both.kill(victim)
    elif candidates:
        random.choice(candidates).kill()
    found = bool(family) and (bool(candidates) or victim not in both.running)
    _wait(lambda: not _alive(driver), 400, "the driver's end")
    _, left = psutil.wait_procs(family, timeout=60)
    left_over = [process.name() for process in left if _alive(process)]
    for name in both.ports:
        if name not in both.running:
            both.start(name)
    again = both.python("-m", "flows.train", "quickstart", folder=folder).wait(600)
    output = (folder / "output.log").read_text()
    difference = f"not continued: {output[-1500:]}" if again else expected.difference(outcome(folder, both.client))
    return Round(victim, after, found, *lost, left_over, difference)


def workspace(folder: Path) -> None:
    """A folder with the quickstart's small form, the project's code and its data."""
    folder.mkdir(parents=True)
    for name in ("flows", "tasks", "models", "data"):
        (folder / name).symlink_to(ROOT / name)
    project = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (quickstart,) = (entry for entry in project["deployments"] if entry["name"] == "quickstart")
    quickstart["parameters"]["config"] = _merged(quickstart["parameters"]["config"], SMALL)
    (folder / "prefect.yaml").write_text(yaml.safe_dump(project | {"deployments": [quickstart], "definitions": {}}))


def _start_run(both: Services, folder: Path, by_worker: bool) -> psutil.Process:
    if not by_worker:
        return psutil.Process(both.python("-m", "flows.train", "quickstart", folder=folder).pid)
    both.environment["DOUBLEFLOW_HOME"] = str(folder)
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    for command in (["deploy", "--all"], ["deployment", "run", "train/quickstart"]):
        subprocess.run([*prefect, *command], cwd=folder, env=both.environment, check=True, capture_output=True)
    own = psutil.Process(both.running["worker"].pid)
    return _wait(lambda: own.children(), 120, "the worker's flow run")[0]


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    def value(name: str) -> Any:
        nested = isinstance(changes[name], dict) and isinstance(base.get(name), dict)
        return _merged(base[name], changes[name]) if nested else changes[name]

    return base | {name: value(name) for name in changes}


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.TransportError:
        return False


def _wait(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.5)
    raise TimeoutError(f"{what} did not come within {seconds:.0f} s")


def main() -> None:
    """Play the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="of each victim")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    chosen = parser.parse_args()
    random.seed(chosen.seed)
    base = Path(tempfile.mkdtemp(prefix="kill-rounds-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        both = stack.enter_context(services(base))
        pool = [sys.executable, "-m", "prefect", "work-pool", "create", "local", "--type", "process"]
        subprocess.run(pool, env=both.environment, check=True, capture_output=True)
        workspace(base / "undisturbed")
        if both.python("-m", "flows.train", "quickstart", folder=base / "undisturbed").wait(600):
            raise SystemExit((base / "undisturbed" / "output.log").read_text()[-3000:])
        expected = outcome(base / "undisturbed", both.client)
        rounds = []
        for number in range(chosen.rounds):
            for victim in chosen.victims:
                rounds.append(play(both, victim, base / f"{victim}-{number}", expected))
                print(json.dumps(vars(rounds[-1])), flush=True)
    table = pd.DataFrame([vars(entry) for entry in rounds])
    table["equal"] = table["difference"].isna()
    print(
        table.groupby("victim")[["equal", "lost_iterations", "lost_seconds"]].agg(["count", "min", "max"]).to_string()
    )
    if not table["equal"].all():
        raise SystemExit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
