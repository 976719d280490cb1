# SPDX-License-Identifier: Apache-2.0
"""What an iteration costs beyond its stages: Prefect's tasks, Ray's calls, MLflow's record, the checkpoint's record.

    python -m benchmarks.orchestration [--iterations 30] [--payloads 4096 50000000] [--servers ephemeral local]

Seven stages as in an iteration of training, with nothing to compute: each hands a payload of so many bytes on, and is
given the prompts and noise keys of 2,048 samples where a run's is. They are called directly, as functions on arrays,
and as the platform does: as Prefect tasks that await Ray actors, with MLflow's metrics in one request and a checkpoint
whose files are 4 KB. Prints medians in milliseconds; with `--write` they stand in the docs. What is written of an
iteration because it is data stands by itself: `records` is the table of 192 samples, 32 pictures and their grid;
`kept` is the payload as a kept stage.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import ray
from prefect import flow
from ray import ObjectRef
from ray.actor import ActorHandle

from benchmarks.docs import put_table
from benchmarks.local_services import Services, ending_at_sigterm
from models.schedulers.noise_keys import NoiseKey
from tasks.actors.actor_group import ActorGroup
from tasks.actors.cluster import ray_cluster
from tasks.actors.rollout_group import PendingBatch
from tasks.config.tracking import TrackingConfig
from tasks.config.trainer import RayConfig
from tasks.data.prompts import Prompt
from tasks.records.pictures import grid
from tasks.records.run_store import CheckpointStore, RunState
from tasks.records.tracking import Tracker
from tasks.stages.stage import stage
from tasks.system.stopwatch import LEFT, Stopwatch

DOCS = Path("docs/platform.md")

METRICS = {f"group/metric_{number}": float(number) for number in range(40)}
SAMPLES, PICTURES = 192, 32
HANDED_ON, GROUP = 2048, 32
"""Samples, of an iteration of the words model and of a prompt of it."""
WARM_UP = 3


def direct(size: int, iterations: int) -> list[float]:
    """Seconds of each iteration, as plain calls."""
    worker, seconds = Worker(), []
    for _ in range(iterations):
        begun = time.perf_counter()
        trajectories = worker.produce(size)
        worker.consume(trajectories)
        np.zeros(SAMPLES) - 0.0
        worker.consume(trajectories)
        worker.consume(worker.produce(size))
        seconds.append(time.perf_counter() - begun)
    return seconds


class Worker:
    """A stage's process, or the stage itself."""

    def produce(self, size: int) -> np.ndarray:
        """A payload."""
        return np.ones(size, np.uint8)

    def consume(self, payload: np.ndarray) -> int:
        """What is left of one."""
        return payload.nbytes

    def write(self, file: Path, payload: np.ndarray) -> None:
        """A payload in a file."""
        file.write_bytes(payload.data)


class Stages:
    """What the stages of an iteration do, on actors, in MLflow and on the disk."""

    def __init__(self, size: int, folder: Path):
        self.size = size
        (self.rollout,), (self.reward,), (self.trainer,) = (ActorGroup(Worker, 1, 0).actors for _ in range(3))
        place = TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", artifacts=(folder / "mlruns").as_uri())
        self.tracker = Tracker(place, "orchestration")
        self.checkpoints, self.kept = CheckpointStore(folder / "checkpoints", 2), CheckpointStore(folder / "stages")
        self.tables = {"samples": pd.DataFrame({f"column_{n}": np.arange(SAMPLES, dtype=float) for n in range(8)})}
        prompts = [Prompt(f"prompt-{i}", "the word in blue on red", "word", {}, "") for i in range(HANDED_ON // GROUP)]
        self.groups = [(prompt, tuple(NoiseKey(0, 1, prompt.uid, i) for i in range(GROUP))) for prompt in prompts]
        self.pictures = [np.random.default_rng(0).integers(0, 255, (24, 48, 3), np.uint8)] * PICTURES

    def sample(self) -> ObjectRef:
        """A payload that stays where it was made."""
        reference = self.rollout.produce.remote(self.size)
        ray.wait([reference], fetch_local=False)
        return reference

    def batches(self, reference: ObjectRef) -> list[PendingBatch]:
        """The samples' prompts and noise keys; what stands for all else is the payload."""
        return [
            PendingBatch((prompt,) * len(keys), keys, (8, 0), reference, None, None, reference, reference, 0)
            for prompt, keys in self.groups
        ]

    def consume(self, actor: ActorHandle, reference: ObjectRef, batches: Sequence[PendingBatch]) -> None:
        """Another actor reads it."""
        ray.get(actor.consume.remote(reference))

    def sync(self) -> None:
        """A payload from the trainer to the rollout."""
        ray.get(self.rollout.consume.remote(self.trainer.produce.remote(self.size)))

    def advantage(self) -> np.ndarray:
        """The stage that is a function on the driver."""
        return np.zeros(SAMPLES) - 0.0

    def log(self, step: int) -> None:
        """The metrics, in one request."""
        self.tracker.log_metrics(step, METRICS)

    def checkpoint(self, step: int) -> None:
        """One whose only file is small."""
        self.checkpoints.save(RunState(step, "c", "d", "r"), lambda at: (at / "weights").write_bytes(bytes(4096)))

    def records(self, step: int) -> None:
        """The samples' table, pictures and grid."""
        drawn = grid(np.stack(self.pictures), 16)
        self.tracker.log_step(step, {}, {"samples": drawn}, self.tables, {"pictures": self.pictures})

    def keep(self, step: int, reference: ObjectRef) -> None:
        """The payload as a kept stage."""

        def write(folder: Path) -> None:
            ray.get(self.rollout.write.remote(folder.resolve() / "batch", reference))

        self.kept.save(RunState(step, "c", "d", "r"), write)
        self.kept.remove(step)


@flow(name="orchestration", persist_result=False)
def measure(size: int, iterations: int, folder: Path) -> pd.DataFrame:
    """Seconds of each iteration on the platform, by part; run in a process of its own."""
    stages, rows = Stages(size, folder), []
    sample, consume, sync = stage("ray")(stages.sample), stage("ray")(stages.consume), stage("ray")(stages.sync)
    advantage, log = stage("stages")(stages.advantage), stage("mlflow")(stages.log)
    checkpoint, records = stage("checkpoint")(stages.checkpoint), stage("records")(stages.records)
    keep = stage("kept")(stages.keep)
    for step in range(iterations):
        clock = Stopwatch()
        reference = sample(clock)
        batches = stages.batches(reference)
        consume(clock, stages.reward, reference, batches)
        advantage(clock)
        consume(clock, stages.trainer, reference, batches)
        sync(clock)
        log(clock, step)
        checkpoint(clock, step)
        timed = clock.finished()
        timed["prefect"] = timed.pop(LEFT)
        # By themselves: data's size, not the platform, decides what it costs to write.
        records(after := Stopwatch(), step)
        keep(after, step, reference)
        rows.append(timed | after.seconds)
    return pd.DataFrame(rows)


def compare(server: str, size: int, iterations: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """A row of the table: the medians in milliseconds, without the first iterations."""
    folder.mkdir()
    options = ["--iterations", str(iterations), "--child", str(size), str(folder)]
    subprocess.run([sys.executable, "-m", "benchmarks.orchestration", *options], env=environment, check=True)
    times = pd.read_parquet(folder / "times.parquet").iloc[WARM_UP:].median() * 1000
    beyond = times["step"] - 1000 * float(np.median(direct(size, iterations)))
    return {"load": psutil.getloadavg()[0], "server": server, "payload": size, "beyond direct": beyond, **times}


def main() -> None:
    """Measure every combination and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--payloads", type=int, nargs="+", default=[4096, 50_000_000], help="bytes")
    parser.add_argument("--servers", nargs="+", choices=["ephemeral", "local"], default=["ephemeral", "local"])
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS}")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        size, folder = int(chosen.child[0]), Path(chosen.child[1])
        with ray_cluster(RayConfig()):
            measure(size, chosen.iterations, folder).to_parquet(folder / "times.parquet")
        return
    if chosen.iterations <= WARM_UP:
        parser.error(f"--iterations {chosen.iterations}: the first {WARM_UP} are left out, so it takes more")
    rows = []
    with ending_at_sigterm(), tempfile.TemporaryDirectory(prefix="orchestration-") as base, ExitStack() as stack:
        services = Services(Path(base))
        for server in chosen.servers:
            environment = dict(services.environment)
            environment.pop("MLFLOW_TRACKING_URI")
            if server == "local":
                stack.callback(lambda: [services.kill(name) for name in list(services.running)])
                services.start("prefect")
            else:
                environment.pop("PREFECT_API_URL")
            for size in chosen.payloads:
                rows.append(compare(server, size, chosen.iterations, Path(base) / f"{server}-{size}", environment))
    columns = ["server", "payload", "beyond direct", "prefect", "ray", "mlflow", "checkpoint", "records", "kept"]
    found = pd.DataFrame(rows)[["load", *columns]].to_markdown(index=False, floatfmt=".1f", intfmt=",")
    found += f"\n\nMedians of {chosen.iterations - WARM_UP} iterations on {os.cpu_count()} cores, in milliseconds."
    print(found)
    if chosen.write:
        put_table(DOCS, "orchestration.py", found)


if __name__ == "__main__":
    main()
