# SPDX-License-Identifier: Apache-2.0
"""A run on servers as a lab has them, each of which fails once: records in Postgres, files in an S3 store, passwords.

    python -m benchmarks.lab_servers --postgres /usr/lib/postgresql/15/bin --s3 PYTHON --site FOLDER [--log lab.jsonl]

MLflow's and Prefect's servers have their records in Postgres, MLflow's has its files in an S3 store, Prefect's wants a
password; all of it on loopback, in a temporary folder. `--s3` is a Python that has `moto[server]`, whose S3 it is;
`--site` a folder into which `pip install --no-deps --target` has put psycopg2-binary, boto3, botocore, s3transfer and
jmespath, for MLflow's server alone: runs need none of them. Each row is `flow-grpo` in small: undisturbed, as a
deployment, and with a server that is killed, or silent, during its second iteration and back after a while. Weights and
MLflow's history must be those of the undisturbed run to the last bit. As root, Postgres runs as the user `postgres`.
`--write` puts the table of the log's newest rows into the docs; without `--postgres` that is all.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
from mlflow import MlflowClient

from benchmarks.docs import put_table, refuse_missing
from benchmarks.endings import newest_rows
from benchmarks.failures import refuse_failed
from benchmarks.kill_rounds import start_run, workspace
from benchmarks.local_services import Services, ending_at_sigterm, import_path, serving, wait_until
from benchmarks.logs import rows_in
from benchmarks.run_state import Outcome, logged, outcome
from tasks.system.ports import free_port
from tasks.system.processes import runs

DOCS = Path("docs/platform.md")
AWAY_S = 15
LOGIN = ("lab", "secret")
BUCKET = "runs"
MORE_PATIENCE = {"tracking": {"max_outage_s": 300}}


class LabServices(Services):
    """Both servers on Postgres and S3, which are started first.

    Args:
        folder: of all their files.
        postgres: the folder of Postgres' programs.
        s3: a Python with moto's server.
        site: packages that MLflow's server needs for them.
    """

    def __init__(self, folder: Path, postgres: Path, s3: str, site: Path):
        super().__init__(folder)
        self.postgres, self.s3 = postgres, s3
        self.places = {"postgres": free_port(), "s3": free_port()}
        self.user = "postgres" if os.geteuid() == 0 else None
        self.environment["PREFECT_API_AUTH_STRING"] = ":".join(LOGIN)
        self.of_servers = {
            "PREFECT_SERVER_API_AUTH_STRING": ":".join(LOGIN),
            "PREFECT_API_DATABASE_CONNECTION_URL": self._database("postgresql+asyncpg", "prefect"),
            "MLFLOW_S3_ENDPOINT_URL": f"http://127.0.0.1:{self.places['s3']}",
            **{"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"},
            "PYTHONPATH": import_path(site, Path(self.environment["PYTHONPATH"])),
        }

    def _database(self, kind: str, name: str) -> str:
        return f"{kind}://postgres@127.0.0.1:{self.places['postgres']}/{name}"

    @property
    def client(self) -> MlflowClient:
        """Of the server: its records are no file."""
        return MlflowClient(self.environment["MLFLOW_TRACKING_URI"])

    @property
    def store(self) -> list[str]:
        """Runs send their files to the server, which has the store's key."""
        return [
            "--backend-store-uri",
            self._database("postgresql", "mlflow"),
            "--artifacts-destination",
            f"s3://{BUCKET}",
        ]

    def start(self, name: str) -> None:
        """Start one, and wait until it answers; a worker and runs have none of the servers' variables."""
        if name == "postgres":
            self._start_postgres()
        elif name == "s3":
            self._start_s3()
        elif name in self.ports:
            own, self.environment = self.environment, self.environment | self.of_servers
            try:
                super().start(name)
            finally:
                self.environment = own
        else:
            super().start(name)

    def _start_postgres(self) -> None:
        data = self.folder / "postgres" / "data"
        if new := not data.exists():
            data.parent.mkdir()
            if self.user is not None:
                self.folder.chmod(0o755)
                shutil.chown(data.parent, self.user)
            self._postgres("initdb", "-D", str(data), "-A", "trust", "-U", "postgres").wait()
        port = str(self.places["postgres"])
        self.running["postgres"] = self._postgres("postgres", "-D", str(data), "-p", port, "-k", str(data.parent))
        at = ["-h", "127.0.0.1", "-p", port]
        wait_until(lambda: self._postgres("pg_isready", *at).wait() == 0, 120, "Postgres' start")
        for name in ("mlflow", "prefect") if new else ():
            self._postgres("createdb", *at, "-U", "postgres", name).wait()

    def _postgres(self, program: str, *arguments: str) -> subprocess.Popen:
        """One of its programs, as the user that it may run as."""
        with (self.folder / "postgres.log").open("a") as log:
            command, place = [str(self.postgres / program), *arguments], self.folder
            return subprocess.Popen(command, cwd=place, stdout=log, stderr=log, user=self.user, start_new_session=True)

    def _start_s3(self) -> None:
        """It has what it keeps in memory, so it is never killed."""
        address, port = f"http://127.0.0.1:{self.places['s3']}", str(self.places["s3"])
        command = [self.s3, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
        with (self.folder / "s3.log").open("a") as log:
            self.running["s3"] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_until(lambda: _is_made(f"{address}/{BUCKET}"), 120, "the S3 store's start")


def _is_made(bucket: str) -> bool:
    try:
        return httpx.put(bucket, timeout=5).is_success
    except httpx.TransportError:
        return False


def killed(lab: LabServices, *names: str) -> None:
    """Servers die at once, and are back after a while: first what the others need."""
    for name in reversed(names):
        lab.kill(name)
    time.sleep(AWAY_S)
    for name in names:
        lab.start(name)


def silent(lab: LabServices, name: str) -> None:
    """A server takes connections, and answers after a while."""
    process = psutil.Process(lab.running[name].pid)
    process.send_signal(signal.SIGSTOP)
    time.sleep(AWAY_S)
    process.send_signal(signal.SIGCONT)


FAULTS: dict[str, Callable[[LabServices], None]] = {
    "Postgres killed": lambda lab: killed(lab, "postgres"),
    "the S3 store silent": lambda lab: silent(lab, "s3"),
    "MLflow's server killed": lambda lab: killed(lab, "mlflow"),
    "Postgres and both servers killed": lambda lab: killed(lab, "postgres", "prefect", "mlflow"),
}


RUNS = ["as a deployment", *FAULTS]


def measure(lab: LabServices, base: Path, name: str, expected: Outcome | None) -> tuple[dict[str, Any], Outcome]:
    """A row, and what its run left: seconds, and whether that is what is expected."""
    folder, begun = base / name.replace(" ", "-").replace("'", ""), time.perf_counter()
    workspace(folder, MORE_PATIENCE)
    if name == "as a deployment":
        _deployed(lab, folder)
    else:
        lab.running["run"] = process = lab.python("-m", "flows.train", "flow-grpo", folder=folder)
        if name in FAULTS:
            wait_until(lambda: logged(folder, lab.client) >= 1 or process.poll() is not None, 400, "an iteration")
            FAULTS[name](lab)
        if process.wait(900):
            raise SystemExit((folder / "output.log").read_text()[-3000:])
        del lab.running["run"]
    found = outcome(folder, lab.client)
    difference = None if expected is None else expected.difference(found)
    row = {"run": name, "seconds": round(time.perf_counter() - begun, 1), "difference": difference}
    return row | {"metrics": len(found.history), "tables": len(found.samples)}, found


def _deployed(lab: LabServices, folder: Path) -> None:
    """A worker takes it, with nothing but the servers' addresses and Prefect's password."""
    lab.start("worker")
    driver = start_run(lab, folder, by_worker=True)
    wait_until(lambda: not runs(driver), 900, "the flow run's end")
    lab.kill("worker")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a run."""
    lines = ["| Run | Seconds | Metrics, sample tables | As the undisturbed one |", "|---|---|---|---|"]
    for row in rows:
        same = "to the last bit" if row["difference"] is None else f"no: {row['difference']}"
        same = "" if row["run"] == "undisturbed" else same
        lines.append(f"| {row['run']} | {row['seconds']} | {row['metrics']}, {row['tables']} | {same} |")
    return "\n".join(lines)


@ending_at_sigterm()
def measure_all(postgres: Path, s3: str, site: Path, log: Path, names: Sequence[str]) -> None:
    """The undisturbed run, and a row for each of these; each goes to the log."""
    base, expected = Path(tempfile.mkdtemp(prefix="lab-")), None
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        lab = stack.enter_context(serving(LabServices(base, postgres, s3, site), "postgres", "s3"))
        for name in ("undisturbed", *names):
            row, found = measure(lab, base, name, expected)
            expected = expected or found
            print(json.dumps(row), flush=True)
            with log.open("a") as stream:
                stream.write(f"{json.dumps(row)}\n")


def main() -> None:
    """Measure, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--postgres", type=Path, help="folder of Postgres' programs")
    parser.add_argument("--s3", help="a Python that has moto[server]")
    parser.add_argument("--site", type=Path, help="packages for MLflow's server")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="beside the undisturbed one")
    parser.add_argument("--log", type=Path, default=Path("lab.jsonl"), help="every row's line is added here")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS}")
    chosen = parser.parse_args()
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    if chosen.postgres is not None:
        if chosen.s3 is None or chosen.site is None:
            parser.error("--postgres also wants --s3 and --site")
        measure_all(chosen.postgres, chosen.s3, chosen.site.resolve(), chosen.log, chosen.runs)
    else:
        refuse_missing(parser, [chosen.log])
    found = table(newest_rows(chosen.log, "run", ["undisturbed", *RUNS]))
    print(found)
    if chosen.write:
        put_table(DOCS, "lab_servers.py", found)
    refuse_failed([f"{row['run']}: {row['difference']}" for row in rows_in(chosen.log) if row["difference"]])


if __name__ == "__main__":
    main()
