# SPDX-License-Identifier: Apache-2.0
"""A run says at its start that its processes compile what they import, where no compiled code is kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.run.start_times import StartTimes

ROOT = Path(__file__).parents[3]
CODE = """
from tasks.run import start_times
start_times.MANY_MODULES = 20  # which are what these lines import
print(start_times.StartTimes().told())
"""


def test_what_took_long_inside_of_a_part_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartTimes, "_counts_process", False)
    start = StartTimes()
    start.mark("checks")
    start.mark("weights to the rollout", {"gather": 0.4, "trainer_canary": 12.25, "rollout_canary": 13.0})
    assert "checks 0.0, weights to the rollout 0.0 (trainer_canary 12.2, rollout_canary 13.0)" in start.told()


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
