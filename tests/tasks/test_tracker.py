# SPDX-License-Identifier: Apache-2.0
"""What a resumed run adds to its MLflow record."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig
from tasks.records.history import RunHistory
from tasks.records.tracking import Tracker
from tests.support.patience import wait_for_server, wait_until


def tracker(folder: Path, run_id: str | None = None) -> Tracker:
    config = TrackingConfig(uri=f"sqlite:///{folder / 'mlflow.db'}", artifacts=(folder / "artifacts").as_uri())
    return Tracker(config, "a-run", run_id)


def test_a_resumed_run_may_go_on_for_longer(tmp_path: Path, monkeypatch) -> None:
    """MLflow refuses to change a parameter: the first value stays one, and a tag tells the present one."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    first = tracker(tmp_path)
    first.log_start(TrainConfig(trainer={"total_training_steps": 10, "seed": 3}), {"who": "a"})
    first.log_step(10, {"reward": 0.5})
    again = tracker(tmp_path, first.run_id)
    again.log_start(TrainConfig(trainer={"seed": 3, "save_freq": 4}), {"who": "b"})
    data = again.client.get_run(first.run_id).data
    assert data.params == {"trainer.total_training_steps": "10", "trainer.seed": "3"}
    told = {name: value for name, value in data.tags.items() if not name.startswith("mlflow.")}
    assert told == {"resumed.trainer.total_training_steps": "100", "resumed.trainer.save_freq": "4", "who": "b"}
    assert not again.log_step(10, {"reward": 0.9})
    assert again.log_step(11, {"reward": 0.6})
    assert again.history("reward") == {10: 0.5, 11: 0.6}


def test_parameters_are_what_was_chosen_and_config_json_is_everything(tmp_path: Path, monkeypatch) -> None:
    """Chosen: set, even to the default, as a sweep sets what it tries; or set by the algorithm's name."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrainConfig(trainer={"seed": 0}, algorithm={"name": "grpo_guard"})
    run = tracker(tmp_path)
    run.log_start(config, {})
    params = run.client.get_run(run.run_id).data.params
    assert params.items() >= {"trainer.seed": "0", "algorithm.name": "grpo_guard"}.items()
    assert params["actor_rollout_ref.actor.diffusion_loss.loss_mode"] == "grpo_guard"
    assert "trainer.total_training_steps" not in params
    assert RunHistory(run.client, run.run_id).config() == config.model_dump(mode="json")


def listening(port: int) -> socket.socket | None:
    """A socket that listens there; None while another one does."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None


def test_mlflow_that_is_gone_does_not_hide_what_ended_the_run(tmp_path: Path, monkeypatch) -> None:
    """Nor is it asked as often as in a run that goes on: each time it answers nothing is one try."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", str(tmp_path)]
    quiet = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(
        command, cwd=tmp_path, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for_server(f"http://127.0.0.1:{port}/health", "MLflow's start")
        tracking = TrackingConfig(uri=f"http://127.0.0.1:{port}")
        runs = {end: Tracker(tracking, end.__name__) for end in (ZeroDivisionError, KeyboardInterrupt)}
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    tries: list[int] = []
    with wait_until(lambda: listening(port), "the last of MLflow's processes to let go of its port") as deaf:

        def hang_up() -> None:
            while True:
                try:
                    deaf.accept()[0].close()
                except OSError:
                    return
                tries.append(1)

        threading.Thread(target=hang_up, daemon=True).start()
        for ended_by, run in runs.items():
            tries.clear()
            with pytest.raises(ended_by) as raised, run.concluded():
                raise ended_by
            assert raised.value.__notes__[0].startswith(f"MLflow at http://127.0.0.1:{port} was not told that run")
            assert 1 <= len(tries) <= 3
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
