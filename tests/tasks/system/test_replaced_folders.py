# SPDX-License-Identifier: Apache-2.0
"""A folder that several processes read while another one may be put in its place."""

from pathlib import Path

import pytest

from tasks.system.files import Replaced, put_in_place, unreplaced


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
