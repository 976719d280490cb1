# SPDX-License-Identifier: Apache-2.0
"""`make check` runs its tests in several processes: nothing that fails in one of them may get lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.waits]  # it tests the tests

ROOT = Path(__file__).parent.parent
# Each can pass only while the others run.
MEETS = """
import os
import time
from pathlib import Path
import pytest

{mark}

def test_meets():
    os.write(1, b"begin of {own}; ")
    Path("here_{own}").touch()
    until = time.monotonic() + 120
    while not all(Path(f"here_{{other}}").exists() for other in "abc"):
        assert time.monotonic() < until, "nobody else runs"
        time.sleep(0.01)
    os.write(1, b"end of {own}.")

def test_goes_on():  # while a module's last test runs, its process has the next module already
    pass
"""
FAILS = """
import warnings
import pytest

@pytest.fixture(scope="session")
def made():
    yield 1
    raise OSError("the end of a fixture")

def test_says_why(capfd):
    print("printed before it failed")
    assert 1 == 2

def test_warns(made):
    warnings.warn("a warning of a test")

@pytest.mark.skip(reason="the reason of a skip")
def test_skipped():
    pass
"""
WAITS_FOR_THE_FIRST = """
import time
from pathlib import Path

until = time.monotonic() + 120
while not Path("begun").exists():
    assert time.monotonic() < until, "no test runs while the others are imported"
    time.sleep(0.01)

def test_one(): pass
"""
BEGINS = """
import time
from pathlib import Path

def test_begins():
    Path("begun").touch()
    time.sleep({seconds})
"""
DIES = """
import os
import signal

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder: Path, *options: str, **modules: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder with these modules and no settings of this project's."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = waits\n")
    for name, text in modules.items():
        (folder / f"test_{name}.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "tests.support.side_by_side", "--processes", "2"]
    return subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_modules_run_at_the_same_time_and_each_once(tmp_path: Path) -> None:
    """Two that compute, and beside them one that waits."""
    others = {f"more_{n}": "def test_one(): pass\ndef test_two(): pass\n" for n in range(4)}
    waits = "pytestmark = pytest.mark.waits"
    meeting = {own: MEETS.format(own=own, mark=waits if own == "c" else "") for own in "abc"}
    ended = run(tmp_path, **meeting, **others)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 14 passed" in ended.stdout
    for own in "abc":
        assert f"begin of {own}; end of {own}." in ended.stdout, "a test's output is its own"
    shown = re.findall(r"^(test_\w+)\.py (\.+)", ended.stdout, re.MULTILINE)
    assert sorted(shown) == [*((f"test_{own}", "..") for own in "abc"), *((f"test_more_{n}", "..") for n in range(4))]


def test_a_folders_tests_begin_while_the_others_are_imported(tmp_path: Path) -> None:
    """And each runs once; where the others cannot be imported, nobody waits for those that run."""
    folder = tmp_path / "units"  # by its name the last to be collected
    folder.mkdir()
    (folder / "test_a.py").write_text(BEGINS.format(seconds=0))
    (folder / "test_b.py").write_text("import pytest\npytestmark = pytest.mark.waits\ndef test_one(): pass\n")
    more = {f"more_{n}": "def test_one(): pass\n" for n in range(4)}
    ended = run(tmp_path, "--first", "units", imported=WAITS_FOR_THE_FIRST, **more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 7 passed" in ended.stdout
    shown = re.findall(r"^(?:units/)?test_(\w+)\.py \.", ended.stdout, re.MULTILINE)
    assert sorted(shown) == ["a", "b", "imported", *more]

    (tmp_path / "begun").unlink()
    (folder / "test_a.py").write_text(BEGINS.format(seconds=10_000))
    ended = run(tmp_path, "--first", "units", imported=WAITS_FOR_THE_FIRST + "import a_module_that_is_not_there\n")
    assert ended.returncode == 2, ended.stdout
    assert "a_module_that_is_not_there" in ended.stdout


def test_a_test_that_no_process_has_run_fails_the_whole(tmp_path: Path) -> None:
    """Here the process that begins takes a test for one that waits, which it leaves to another."""
    (tmp_path / "units").mkdir()
    (tmp_path / "units/test_b.py").write_text("def test_one(): pass\n")
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n    if len(items) == 1: items[0].add_marker('waits')\n"
    )
    ended = run(tmp_path, "--first", "units", a="def test_passes(): pass\n")
    assert ended.returncode not in (0, 5), ended.stdout
    assert "no process has run 1 tests, units/test_b.py::test_one for one" in ended.stdout + ended.stderr


def test_what_fails_warns_and_is_skipped_is_told_as_in_one_process(tmp_path: Path) -> None:
    ended = run(tmp_path, a="def test_passes(): pass\n", fails=FAILS)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    for said in (
        "assert 1 == 2",
        "printed before it failed",
        "OSError: the end of a fixture",
        "UserWarning: a warning of a test",
        "the reason of a skip",
        "1 failed, 2 passed, 1 skipped, 1 warning, 1 error in ",
    ):
        assert said in ended.stdout


def test_a_process_that_dies_and_tests_that_cannot_be_imported_fail_the_whole(tmp_path: Path) -> None:
    ended = run(tmp_path, a="def test_passes(): pass\n", dies=DIES)
    assert ended.returncode not in (0, 5), ended.stdout
    assert "a process of the tests ended with -9" in ended.stdout + ended.stderr
    ended = run(tmp_path, dies="import a_module_that_is_not_there\n")
    assert ended.returncode == 2, ended.stdout
    assert "a_module_that_is_not_there" in ended.stdout
