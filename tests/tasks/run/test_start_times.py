# SPDX-License-Identifier: Apache-2.0
"""A run says at its start that its processes compile what they import, where no compiled code is kept."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = """
from tasks.run import start_times
start_times.MANY_MODULES = 20  # which are what these lines import
print(start_times.StartTimes().told())
"""


def told(prefix: Path | str, *options: str) -> str:
    """What a process says that keeps its compiled code under `prefix`."""
    command = [sys.executable, "-X", f"pycache_prefix={prefix}", *options, "-c", CODE]
    given = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(command, check=True, env=os.environ | given, stdout=subprocess.PIPE, text=True).stdout


def test_modules_that_each_process_compiles_are_told(tmp_path: Path) -> None:
    assert "anew, as their __pycache__ is not written (PYTHONDONTWRITEBYTECODE)" in told(tmp_path, "-B")
    assert not list(tmp_path.iterdir())
    assert "anew, as their __pycache__ is not there and cannot be written" in told("/dev/null/cache")


def test_compiled_code_that_is_kept_is_no_news(tmp_path: Path) -> None:
    assert "anew" not in told(tmp_path)
    assert "anew" not in told(tmp_path, "-B")  # it is there
