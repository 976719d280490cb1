# SPDX-License-Identifier: Apache-2.0
"""A signal within a request to MLflow's local database waits for its end, and the database is not left locked; which
signal is the last; and what is said where the disk below the database is full."""

import errno
import signal
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from sqlalchemy.engine.default import DefaultDialect

from tasks.config.tracking import TrackingConfig
from tasks.records.patience import LocalClient
from tasks.records.tracking import HalfMade, mlflow_client
from tasks.system.signals import heeded_once, held_back
from tests.support.mlflow_store import mlflow_in


class Stop(BaseException):
    """What the handler raises."""


def stop(number: int, frame: object) -> None:
    raise Stop


def set_while_a_signal_comes(client: MlflowClient | LocalClient, run: str, patch: pytest.MonkeyPatch) -> bool:
    """Set a tag; the signal comes while the transaction is open. Was the caller stopped?"""
    commit = DefaultDialect.do_commit

    def interrupted(dialect: DefaultDialect, connection: Any) -> None:
        patch.setattr(DefaultDialect, "do_commit", commit)
        signal.raise_signal(signal.SIGTERM)
        commit(dialect, connection)

    patch.setattr(DefaultDialect, "do_commit", interrupted)
    try:
        client.set_tag(run, "a", "b")
    except Stop:
        return True
    return False


@pytest.mark.parametrize(("held", "kept"), [(True, "b"), (False, None)], ids=["held", "plain"])
def test_a_request_that_a_signal_meets_is_done_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool, kept: str | None
) -> None:
    """MLflow's own client leaves it undone; that is what the other holds the signal back for."""
    plain = MlflowClient(mlflow_in(tmp_path))
    run = plain.create_run("0").info.run_id
    before = signal.signal(signal.SIGTERM, stop)
    try:
        assert set_while_a_signal_comes(LocalClient(plain) if held else plain, run, monkeypatch)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert MlflowClient(mlflow_in(tmp_path)).get_run(run).data.tags.get("a") == kept


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


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_signal_that_ends_a_block_is_the_last(first: signal.Signals) -> None:
    """Of a command; Python's own handler of Ctrl-C, which a notebook has, stays."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else Stop

    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, end) for kind in kinds]
    try:
        with pytest.raises((KeyboardInterrupt, Stop)), heeded_once():
            signal.raise_signal(first)
        for kind in kinds:
            signal.raise_signal(kind)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt), heeded_once():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGTERM, end)
        with pytest.raises(ValueError, match="of the block"), heeded_once():
            raise ValueError("of the block")
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def test_a_full_disk_under_the_database_or_its_files_is_named(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite's error is none of the system's, and that of a copied file does not say which; MLflow logs frames."""
    uri = mlflow_in(small_disk)
    client = LocalClient(MlflowClient(uri))
    run = client.create_run(client.create_experiment("full", (small_disk / "files").as_uri())).info.run_id
    (picture := tmp_path / "picture.png").write_bytes(bytes(2**21))
    caplog.clear()
    with pytest.raises(OSError, match="No space left") as raised:
        client.log_artifact(run, str(picture))
    assert raised.value.filename == f"artifacts of {uri}"
    with pytest.raises(OSError, match="No space left") as raised:  # noqa: PT012  sooner or later
        for number in range(200):
            client.set_tag(run, f"tag {number}", "a" * 4000)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, uri)
    assert "mlflow.store.db.utils" not in {record.name for record in caplog.records}


def test_a_database_that_mlflow_has_no_room_to_make_is_told_then_and_at_the_next_start(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow makes it in steps, and does not go on where it was half made."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrackingConfig(uri=f"sqlite:///{small_disk / 'mlflow.db'}")
    room = 2**18
    (others := small_disk / "another's").write_bytes(bytes(2**20 - room))
    with pytest.raises(OSError, match="No space left") as raised:
        mlflow_client(config)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, config.uri)
    others.unlink()
    with pytest.raises(HalfMade, match="some of its tables only"):
        mlflow_client(config)
