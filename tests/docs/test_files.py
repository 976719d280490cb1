# SPDX-License-Identifier: Apache-2.0
"""The map of the files is what the files say of themselves, and every file says something."""

import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = runpy.run_path(str(ROOT / "docs" / "file_map.py"))


def test_the_map_is_what_the_files_say() -> None:
    written = (ROOT / "docs" / "files.md").read_text()
    assert written == MAP["page"](ROOT), "docs/files.md is not of today's files: python docs/file_map.py"


def test_every_tracked_file_is_in_the_map() -> None:
    page, paths = (ROOT / "docs" / "files.md").read_text(), MAP["tracked"](ROOT)
    assert {"flows/train.py", "docs/examples/family.py", ".github/workflows/ci.yml", "LICENSE"} <= {*paths}
    assert [path for path in MAP["SAID"] if path not in paths] == []
    sections = {section.split("\n")[0].strip("/"): section for section in page.split("\n## ")[1:]}
    for path in map(Path, paths):
        section = sections[str(path.parent)]
        assert path.name == "__init__.py" or section.count(f"\n| `{path.name}` | ") == 1, path


def test_an_archive_of_the_source_has_the_same_files(tmp_path: Path) -> None:
    """Without .git, and beside what is made there."""
    paths = MAP["tracked"](ROOT)
    for path in [*paths, ".venv/bin/python", "runs/quickstart/config.yaml"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        if path in paths:
            shutil.copy(ROOT / path, tmp_path / path)
        else:
            (tmp_path / path).touch()
    assert MAP["tracked"](tmp_path) == paths


def test_a_file_that_says_nothing_is_named() -> None:
    for source in ("", "x = 1\n", '"""A title without an end"""\n'):
        with pytest.raises(ValueError, match=r"models/new\.py does not begin with a sentence"):
            MAP["first_sentence"]("models/new.py", source)


@pytest.mark.parametrize(
    ("path", "source", "sentence"),
    [
        ("a.py", '"""Size 3.5, e.g. of one|two:\nboth. More."""', "Size 3.5, e.g. of one|two: both."),
        ("a.py", '"""Does it learn? A curve."""', "Does it learn?"),
        ("a.md", "# What came out\n\nText.\n", "What came out."),
        ("a.yaml", "# Records of runs.\n# More.\nx: 1\n", "Records of runs."),
        ("a.sh", "#!/bin/sh\n# Installs\n# all. More.\nset -e\n", "Installs all."),
        ("Makefile", "# The commands.\nx:\n", "The commands."),
        ("a.j2", "{#- One page. -#}\n<html>", "One page."),
    ],
)
def test_the_first_sentence(path: str, source: str, sentence: str) -> None:
    assert MAP["first_sentence"](path, source) == sentence
