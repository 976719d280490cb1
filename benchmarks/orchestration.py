"""What an iteration costs beyond its stages: Prefect's tasks, Ray's calls, MLflow's record, the checkpoint's record.

    python -m benchmarks.orchestration [--iterations 30] [--payloads 4096 50000000] [--servers ephemeral local]

Seven stages as in an iteration of training, with nothing to compute: each hands a payload of so many bytes on. They
are called directly, as functions on arrays, and as the platform does: as Prefect tasks that await Ray actors, with
MLflow's metrics in one request and a checkpoint whose files are 4 KB. Prints medians in milliseconds; with
`--write` they stand in the docs. What is written of an iteration because it is data stands by itself: `records` is the
table of 192 samples, 32 pictures and their grid; `kept` is the payload as a kept stage.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import psutil

from benchmarks.docs import put_table
from benchmarks.local_services import Services

DOCS = Path("docs/platform.md")

METRICS = {f"group/metric_{number}": float(number) for number in range(40)}
SAMPLES, PICTURES = 192, 32


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


def measure(size: int, iterations: int, folder: Path) -> pd.DataFrame:
    """Milliseconds of each iteration on the platform, by part; run in a process of its own."""
    import ray
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    from tasks.checkpoint import CheckpointStore, RunState
    from tasks.clock import Stopwatch
    from tasks.cluster import ActorGroup, ray_cluster
    from tasks.config import RayConfig, TrackingConfig
    from tasks.pictures import grid
    from tasks.tracking import Tracker

    def stage(part: str, work: Callable) -> Callable:
        """As the stages' tasks are: the work is timed inside, so what is left is Prefect."""

        @task(name=part, cache_policy=NO_CACHE, persist_result=False)
        def run(clock, *arguments):
            with clock.stage(part):
                return work(*arguments)

        return run

    @flow(name="orchestration", persist_result=False)
    def iterate_all() -> pd.DataFrame:
        (rollout,), (reward,), (trainer,) = (ActorGroup(Worker, 1, 0).actors for _ in range(3))
        place = TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", artifacts=(folder / "mlruns").as_uri())
        tracker = Tracker(place, "orchestration")
        store, kept = CheckpointStore(folder / "checkpoints", 2), CheckpointStore(folder / "stages")
        tables = {"samples": pd.DataFrame({f"column_{n}": np.arange(SAMPLES, dtype=float) for n in range(8)})}
        pictures = [np.random.default_rng(0).integers(0, 255, (24, 48, 3), np.uint8)] * PICTURES

        def sample():
            reference = rollout.produce.remote(size)
            ray.wait([reference], fetch_local=False)
            return reference

        sample_task = stage("ray", sample)
        consume = stage("ray", lambda actor, reference: ray.get(actor.consume.remote(reference)))
        sync = stage("ray", lambda: ray.get(rollout.consume.remote(trainer.produce.remote(size))))
        advantage = stage("stages", lambda: np.zeros(SAMPLES) - 0.0)
        log = stage("mlflow", lambda step: tracker.log_metrics(step, METRICS))

        def keep(step, drawn):
            tracker.log_step(step, {}, {"samples": drawn}, tables, {"pictures": pictures})

        def checkpoint(step):
            store.save(RunState(step, "c", "d", "r"), lambda at: (at / "weights").write_bytes(bytes(4096)))

        def keep_stage(step, reference):
            state = RunState(step, "c", "d", "r")
            kept.save(state, lambda at: ray.get(rollout.write.remote(at.resolve() / "batch", reference)))
            kept.remove(step)

        records, save = stage("records", keep), stage("checkpoint", checkpoint)
        keep_rollout = stage("kept", keep_stage)
        rows = []
        for step in range(iterations):
            clock = Stopwatch()
            reference = sample_task(clock)
            consume(clock, reward, reference)
            advantage(clock)
            consume(clock, trainer, reference)
            sync(clock)
            log(clock, step)
            save(clock, step)
            timed = clock.finished()
            timed["prefect"] = timed["step"] - sum(value for name, value in timed.items() if name != "step")
            # By themselves: data's size, not the platform, decides what it costs to write.
            records(after := Stopwatch(), step, grid(np.stack(pictures), 16))
            keep_rollout(after, step, reference)
            rows.append(timed | after.seconds)
        return pd.DataFrame(rows)

    with ray_cluster(RayConfig()):
        return iterate_all()


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
        measure(size, chosen.iterations, folder).to_parquet(folder / "times.parquet")
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="orchestration-") as base:
        services = Services(Path(base))
        for server in chosen.servers:
            environment = dict(services.environment)
            environment.pop("MLFLOW_TRACKING_URI")
            if server == "local":
                services.start("prefect")
            else:
                environment.pop("PREFECT_API_URL")
            for size in chosen.payloads:
                folder = Path(base) / f"{server}-{size}"
                folder.mkdir()
                options = ["--iterations", str(chosen.iterations), "--child", str(size), str(folder)]
                command = [sys.executable, "-m", "benchmarks.orchestration", *options]
                subprocess.run(command, env=environment, check=True)
                times = pd.read_parquet(folder / "times.parquet").iloc[3:].median() * 1000
                beyond = times["step"] - 1000 * float(np.median(direct(size, chosen.iterations)))
                load = psutil.getloadavg()[0]
                rows.append({"load": load, "server": server, "payload": size, "beyond direct": beyond, **times})
        for name in list(services.running):
            services.kill(name)
    columns = ["server", "payload", "beyond direct", "prefect", "ray", "mlflow", "checkpoint", "records", "kept"]
    found = pd.DataFrame(rows)[["load", *columns]].to_markdown(index=False, floatfmt=".1f", intfmt=",")
    found += f"\n\nMedians of {chosen.iterations - 3} iterations on {os.cpu_count()} cores, in milliseconds."
    print(found)
    if chosen.write:
        put_table(DOCS, "orchestration.py", found)


if __name__ == "__main__":
    main()
