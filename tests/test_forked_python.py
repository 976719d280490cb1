# SPDX-License-Identifier: Apache-2.0
"""A command whose `python` is a fork gets what it would from python, and both ends come together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tasks.system.processes import wait_until_ended
from tests.support.forked import DRIVER
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

TOLD = """
import json, os, sys
print("an error", file=sys.stderr)
imported = "torch" in sys.modules  # before any import of this module's
said = {"arguments": sys.argv[1:], "folder": os.getcwd(), "mark": os.environ["MARK"], "input": sys.stdin.read()}
print(json.dumps(said | {"imported": imported}))
sys.exit(7)
"""


def started(python: Path, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """`python ...` in a folder, in which it finds modules."""
    environment = {"PYTHONPATH": str(folder), "MARK": "of the command"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [python, *arguments], cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def test_a_fork_is_the_command_that_python_would_be(forked_python: Path, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(TOLD)
    answers = []
    for python in (forked_python, Path(sys.executable)):
        process = started(python, tmp_path, "-m", "told", "a word", "--option")
        said, errors = process.communicate("given", timeout=PATIENCE)
        assert errors == "an error\n"
        answers.append((process.returncode, json.loads(said)))
    forked, plain = answers
    assert (forked[1].pop("imported"), plain[1].pop("imported")) == (not DRIVER.exists(), False)
    assert forked == plain
    assert forked[0] == 7
    assert forked[1]["arguments"] == ["a word", "--option"]


def test_a_script_is_pythons_own(forked_python: Path, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(TOLD)
    said, _ = started(forked_python, tmp_path, "told.py").communicate("", timeout=PATIENCE)
    assert not json.loads(said)["imported"]


def test_a_signal_that_ends_the_fork_ends_the_command(forked_python: Path, tmp_path: Path) -> None:
    process = started(forked_python, tmp_path, "-c", "import os; os.kill(os.getpid(), 15)")
    assert process.wait(PATIENCE) == -15


def test_who_asks_and_is_killed_takes_the_fork_along(forked_python: Path, tmp_path: Path) -> None:
    waits = "import os, time; print(os.getpid(), flush=True); time.sleep(7200)"
    with started(forked_python, tmp_path, "-c", waits) as process:
        assert process.stdout is not None
        fork = psutil.Process(int(process.stdout.readline()))
        assert fork.pid != process.pid
        process.kill()
    assert not wait_until_ended([fork], PATIENCE)


BESIDE_A_GPU = """
import os, sys
from pathlib import Path

there = Path.exists
Path.exists = lambda path: str(path) == "/dev/nvidiactl" or there(path)  # CUDA's driver
from tests.support import forked

if sys.argv[1] == "served here":
    forked.serve_from_here(forked.OF_COMMANDS)
forked.preload(forked.OF_COMMANDS)
what = "import sys; print([name for name in ('torch', 'diffusers', 'prefect') if name in sys.modules])"
program = forked.Program(["-c", what], Path.cwd(), dict(os.environ), Path("said"))
assert program.wait(900) == 0, program.output()
print(program.output())
"""


@pytest.mark.parametrize("served", ["served here", "served apart"])
def test_beside_a_gpu_a_program_imports_all_by_itself(tmp_path: Path, served: str) -> None:
    """A fork of a process that has asked for the number of GPUs may not use them, and diffusers' import asks."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BESIDE_A_GPU, served]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
