# SPDX-License-Identifier: Apache-2.0
"""A test that a page names is there, so that what the page claims is held by something."""

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(?:((?:[\w-]+/)*test_\w+\.py)(?:::(\w+))?|(test_\w+))`")
"""`test_x.py`, with folders or without, `test_x.py::test_name`, or `test_name`."""


def tracked(pattern: str) -> list[Path]:
    """Files that git tracks."""
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / path for path in listed.stdout.split()]


text_of = functools.cache(Path.read_text)


@functools.cache
def functions_of(file: Path) -> set[str]:
    """The test functions of a file."""
    nodes = ast.walk(ast.parse(text_of(file)))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def has_test(file: Path, name: str) -> bool:
    """A file that does not even say the name is not parsed."""
    return f"def {name}(" in text_of(file) and name in functions_of(file)


FILES = [file for file in tracked("tests/*.py") if file.name.startswith("test_")]


def missing_tests(text: str) -> list[str]:
    """Files of tests and tests that a text names in backquotes and that are not there; a file named without its folder
    must be the only one of its name."""
    missing = []
    for path, in_file, alone in NAMED.findall(text):
        files = [file for file in FILES if file == ROOT / path or ("/" not in path and file.name == path)]
        if path and (len(files) != 1 or (in_file and not has_test(files[0], in_file))):
            missing.append(f"{path}::{in_file}" if in_file else path)
        if alone and not any(has_test(file, alone) for file in FILES):
            missing.append(alone)
    return missing


PAGES = [page for page in tracked("*.md") if page.name != "files.md"]  # the map has a test of its own


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    assert not missing_tests(page.read_text())


def test_the_findings_have_their_tests_in_files() -> None:
    """Each of the numbered findings names at least one, and with its file, where a reader finds it."""
    section = (ROOT / "docs/security.md").read_text().split("## What was found, and its test")[1]
    rows = re.findall(r"^\| (\d+) \|.*$", section, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 31)]
    for row in re.findall(r"^\| \d+ \|.*$", section, re.MULTILINE):
        found = NAMED.findall(row)
        assert found, row
        assert all(path and name for path, name, _ in found), row


def test_what_counts_as_missing() -> None:
    text = "`tests/docs/test_files.py`, `test_files.py::test_the_first_sentence`, `test_the_first_sentence`, "
    text += (
        "`test_ratio`, `test_nothing.py`, `tests/tasks/test_files.py`, `test_files.py::test_nothing`, `flows/train.py`"
    )
    assert missing_tests(text) == [
        "test_ratio",
        "test_nothing.py",
        "tests/tasks/test_files.py",
        "test_files.py::test_nothing",
    ]
