# SPDX-License-Identifier: Apache-2.0
"""A folder that several processes read while another one may be put in its place."""

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.system.files import Replaced, put_in_place, unreplaced

ROOT = Path(__file__).parents[3]
AS_NOBODY = """
import os, tempfile
from pathlib import Path
from tasks.system.files import put_in_place

if os.geteuid() == 0:
    os.setuid(65534)


def write(aside, is_whole):
    (aside / "vae" / "inner").mkdir(parents=True)
    (aside / "vae" / "file").write_text("a")
    for folder in (aside / "vae" / "inner", aside / "vae", aside):
        folder.chmod(0o555)
    if not is_whole:
        raise ValueError("the block's own error")


with tempfile.TemporaryDirectory() as within:
    folder = Path(within) / "weights"
    for is_whole in (False, True, True):
        try:
            with put_in_place(folder) as aside:
                write(aside, is_whole)
        except ValueError as error:
            print(error)
    print(*sorted(os.listdir(within)), (folder / "vae" / "file").read_text())
"""


def written(folder: Path, text: str) -> Path:
    with put_in_place(folder) as aside:
        aside.mkdir()
        (aside / "weights").write_text(text)
    return folder


def test_what_was_read_of_a_folder_that_was_replaced_is_not_believed(tmp_path: Path) -> None:
    folder = written(tmp_path / "weights", "a")
    with unreplaced(folder):
        assert (folder / "weights").read_text() == "a"
    with pytest.raises(Replaced, match="weights was replaced while it was read"), unreplaced(folder):
        written(folder, "b")
    with pytest.raises(Replaced), unreplaced(folder):
        folder.rename(tmp_path / "old").joinpath("none").read_text()
    written(folder, "c")
    with pytest.raises(ZeroDivisionError), unreplaced(folder):
        raise ZeroDivisionError


def test_a_read_only_folder_that_is_left_over_gives_way() -> None:
    """It is what a copy of a read-only one is, and hid the error that was met while it was written."""
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["the block's own error", "weights a"], done.stderr
