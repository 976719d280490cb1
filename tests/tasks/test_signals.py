# SPDX-License-Identifier: Apache-2.0
"""A signal within a request to MLflow's local database waits for its end, and the database is not left locked."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.system.signals import held_back
from tests.support.mlflow_store import mlflow_in

WRITER = """
import os, signal, sys
import mlflow
from sqlalchemy.engine.default import DefaultDialect
from tasks.records.patience import LocalClient

class Stop(BaseException):
    pass

def stop(number, frame):
    raise Stop

signal.signal(signal.SIGTERM, stop)
commit = DefaultDialect.do_commit

def interrupted(dialect, connection):  # the signal comes while the transaction is open
    DefaultDialect.do_commit = commit
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10):
        pass
    commit(dialect, connection)

uri = sys.argv[1]
plain = mlflow.MlflowClient(uri)
for name, client in (("held", LocalClient(plain)), ("plain", plain)):
    run = client.create_run("0").info.run_id
    DefaultDialect.do_commit = interrupted
    try:
        client.set_tag(run, "a", "b")
    except Stop:
        print(name, "stopped", mlflow.MlflowClient(uri).get_run(run).data.tags.get("a"))
"""


def test_a_request_that_a_signal_meets_is_done_whole(tmp_path: Path) -> None:
    """MLflow's own client leaves it undone; that is what the other holds the signal back for."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITER, mlflow_in(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.stdout == "held stopped b\nplain stopped None\n", ended.stderr[-2000:]


def test_a_held_signal_is_heard_after_the_block_and_once() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append("handled"))
    try:
        with held_back():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            heard.append("block")
        assert heard == ["block", "handled"]
        with held_back(), pytest.raises(ValueError, match="of the block"):
            raise ValueError("of the block")
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["block", "handled", "handled"]
    finally:
        signal.signal(signal.SIGTERM, before)
