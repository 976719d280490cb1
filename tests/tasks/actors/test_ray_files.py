# SPDX-License-Identifier: Apache-2.0
"""A cluster's files are its user's alone, and gone when it is; its real processes too."""

import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tasks.actors.cluster import WorkerNeeds, ray_cluster
from tasks.actors.ray_files import RayFilesError, keep_token_private, working_folder
from tasks.config.errors import ConfigError
from tasks.config.trainer import RayConfig
from tests.support.forked import Program
from tests.support.patience import PATIENCE, wait_until

ROOT = Path(__file__).parents[3]
LOOK = """
import os, stat, time
from pathlib import Path
import ray
from tasks.actors import worker_forks
from tasks.actors.cluster import ray_cluster
from tasks.config.trainer import RayConfig

def engines_sockets():
    from tasks.actors.ray_files import keep_engines_sockets
    keep_engines_sockets()
    return os.environ["VLLM_RPC_BASE_PATH"]

worker_forks.IMPORTED = ()  # what workers begin with is not the question
with ray_cluster(RayConfig(num_cpus=1)):
    (outer,) = Path(os.environ["RAY_TMPDIR"]).iterdir()
    assert stat.S_IMODE(outer.stat().st_mode) == 0o700, oct(outer.stat().st_mode)
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    assert session.is_relative_to(outer), session
    token = Path.home() / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600, oct(token.stat().st_mode)
    assert len(token.read_text()) == 64
    sockets = Path(ray.get(ray.remote(num_cpus=0)(engines_sockets).remote()))
    assert sockets.is_dir() and sockets.is_relative_to(outer), sockets
    assert len(str(sockets)) < 60, sockets
    assert "VLLM_RPC_BASE_PATH" not in os.environ
    print("held", flush=True)
    while not Path("goes on").exists():
        time.sleep(0.1)
    raise ArithmeticError
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """Ray's sockets have paths of at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.ray
@pytest.mark.parametrize("end", ["fail", "kill"])
def test_a_clusters_folder_is_private_and_gone_with_it(short: Path, tmp_path: Path, end: str) -> None:
    """After an error the logs stay. The first cluster of a user makes the token."""
    hidden = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "VLLM_RPC_BASE_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(tmp_path), "RAY_TMPDIR": str(short), "PYTHONPATH": str(ROOT)}
    driver = Program(["-c", LOOK], tmp_path, environment, tmp_path / "output")
    wait_until(lambda: "held\n" in driver.output() or driver.poll() is not None, "the cluster's start", every=0.1)
    assert driver.poll() is None, driver.output()
    if end == "kill":
        os.kill(driver.pid, signal.SIGKILL)
    (tmp_path / "goes on").touch()
    driver.wait(PATIENCE)
    if end == "fail":
        (outer,) = short.iterdir()
        assert [path.name for path in outer.iterdir()] == ["logs"]
        assert f"the logs of Ray's processes are in {outer / 'logs'}" in driver.output()
    else:
        wait_until(lambda: not list(short.iterdir()), "the end of the folder", every=0.1)


def test_a_folder_goes_with_its_block(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    with working_folder() as folder:
        (folder / "session_1" / "logs").mkdir(parents=True)
        assert mode(folder.parent) == 0o700
    assert not list(short.iterdir())


def test_a_folder_whose_path_is_too_long_is_refused(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = short / ("x" * 40)
    longer.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(longer))
    with (
        pytest.raises(RayFilesError, match=r"set RAY_TMPDIR to a folder with a path of at most 2\d char"),
        working_folder(),
    ):
        pass
    assert not list(longer.iterdir())


def test_a_folder_that_is_not_there_is_refused(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's word is no defect: a sentence, not frames."""
    monkeypatch.setenv("RAY_TMPDIR", str(short / "scratch"))
    told = rf"cannot be written into RAY_TMPDIR {short}/scratch \(No such file or directory\): set RAY_TMPDIR"
    with pytest.raises(RayFilesError, match=told), working_folder():
        pass


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's token would be."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def test_a_new_token_is_private_and_stays_the_same(token: Path) -> None:
    keep_token_private(makes_one=False)
    assert not token.exists()
    keep_token_private(makes_one=True)
    first = token.read_text()
    keep_token_private(makes_one=True)
    assert token.read_text() == first
    assert (mode(token.parent), mode(token)) == (0o700, 0o600)
    assert list(token.parent.iterdir()) == [token]


def test_a_token_that_others_could_read_is_closed_or_refused(
    token: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token.parent.mkdir()
    token.write_text("a" * 64)
    token.chmod(0o644)
    keep_token_private(makes_one=True)
    assert (mode(token), token.read_text()) == (0o600, "a" * 64)
    assert "others could read" in caplog.text
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/proc/sys/kernel/ostype")  # whose mode nobody can change
    with pytest.raises(
        RayFilesError, match=r"/proc/sys/kernel/ostype, .* is not this user's alone .*: see to its mode, 600"
    ):
        keep_token_private(makes_one=True)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 64)
    keep_token_private(makes_one=True)


def test_a_place_for_compiled_code_that_cannot_be_made_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that begins with it would die, and Ray starts another, for ever."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "file").touch()
    needs = WorkerNeeds(compiles=True, compile_cache=str(tmp_path / "file" / "compiled"))
    with pytest.raises(ConfigError, match=r"^trainer\.compile_cache.*Not a directory"), ray_cluster(RayConfig(), needs):
        pass
    assert not ray.is_initialized()
