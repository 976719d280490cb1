# SPDX-License-Identifier: Apache-2.0
"""Stages of a real DVC beside other work: they end with it, and one that fails is told."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.deploy import stages_beside as module
from flows.deploy.stages_beside import StageError, stages_beside
from tasks.system.processes import runs
from tests.support.patience import PATIENCE, wait_until

pytest.importorskip("dvc", reason="the data stages need the extra doubleflow[data]")

pytestmark = [pytest.mark.slow, pytest.mark.waits]

FILE = Path("dvc.yaml")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of DVC's without git, in which this process is."""
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], check=True)
    return tmp_path


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
def test_what_ends_the_block_ends_dvc_and_its_stage(here: Path, ctrl_c: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_SECONDS", PATIENCE)
    FILE.write_text("stages:\n  long: {cmd: echo $$ > pid && sleep 7200}\n")
    family, begun = [], []

    def interrupted() -> None:
        with stages_beside(FILE) as making:
            begun.append(making.process)
            wait_until(lambda: (here / "pid").is_file() and (here / "pid").read_text().strip(), "the stage's begin")
            stage = psutil.Process(int((here / "pid").read_text()))
            family.extend([stage, *stage.parents()[:1], *stage.children()])
            raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGINT, ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert signal.getsignal(signal.SIGINT) == ctrl_c
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert not [process for process in family if runs(process)]
    (dvc,) = begun
    assert dvc.returncode != -signal.SIGKILL, "they were killed: they had not heard it"


def test_a_stage_that_fails_is_told(here: Path) -> None:
    FILE.write_text("stages:\n  wrong: {cmd: exit 3}\n")
    with stages_beside(FILE) as making:
        making.check()  # it has only begun
        with pytest.raises(StageError, match="failed with exit code"):
            making.wait()
        with pytest.raises(StageError, match="failed with exit code"):
            making.check()


def test_without_a_file_there_is_nothing_to_wait_for(here: Path) -> None:
    with stages_beside(None) as making:
        making.check()
        making.wait()
