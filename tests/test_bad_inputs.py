# SPDX-License-Identifier: Apache-2.0
"""300 of the inputs of `python -m benchmarks.bad_inputs`: each is refused in a sentence, or is taken for what it is."""

import functools
import re
from pathlib import Path

import pytest

from benchmarks.bad_inputs.cases import GOOD, Case, Outcome, draws, judge
from benchmarks.bad_inputs.local_mlflow import tracking
from benchmarks.bad_inputs.targets import TARGETS, all_cases, whole
from tests.support.mlflow_store import mlflow_in

PAGE = Path(__file__).parents[1] / "docs/security.md"
SEED, COUNT = 0, 300


@pytest.fixture(scope="module", autouse=True)
def database() -> None:
    """Of the inputs that lead to MLflow: a copy of an empty one, whose tables it takes a second to make."""
    mlflow_in(Path(tracking().uri.removeprefix("sqlite:///")).parent)


@functools.cache
def cases_of(target: str) -> list[Case]:
    """All of a target; in the tests, for to make them while these are collected would keep all processes waiting."""
    return all_cases(target, SEED)


def share(target: str) -> list[Case]:
    """So many inputs of a target as its share of all is, drawn by the seed."""
    number = max(round(COUNT * len(cases_of(target)) / sum(len(cases_of(other)) for other in TARGETS)), 10)
    return draws("the test's", 0, SEED).sample(cases_of(target), number)


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_is_a_traceback_is_taken_for_another_or_damages_a_file(target: str, tmp_path: Path) -> None:
    wrong = []
    for number, case in enumerate(share(target)):
        folder = tmp_path / str(number)
        folder.mkdir()
        judged = judge(case, folder)
        if judged.outcome not in GOOD:
            wrong.append(f"{judged.outcome.value}: {case.name[:200]}: {judged.words[:300]}")
    assert not wrong, "\n".join(wrong)


def test_inputs_with_nothing_wrong_are_taken(tmp_path: Path) -> None:
    """Else a code that refuses everything would pass."""
    refused = []
    for number, case in enumerate(whole()):
        folder = tmp_path / str(number)
        folder.mkdir()
        judged = judge(case, folder)
        if judged.outcome is not Outcome.RIGHT:
            refused.append(f"{judged.outcome.value}: {case.target}: {case.name}: {judged.words[:300]}")
    assert not refused, "\n".join(refused)


def test_there_are_as_many_as_the_page_says() -> None:
    """Every input of the table is one that the command makes, and none of them came to a bad end."""
    page = PAGE.read_text()
    found = re.search(r"<!-- benchmarks/bad_inputs -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found is not None
    rows = {}
    for line in found[1].splitlines()[2:]:
        name, *numbers = (cell.strip().strip("*") for cell in line.strip("|").split("|"))
        rows[name] = [int(number) for number in numbers]
    total = rows.pop("all")
    assert {name: row[0] for name, row in rows.items()} == {target: len(cases_of(target)) for target in TARGETS}
    assert [sum(column) for column in zip(*rows.values(), strict=True)] == total
    inputs, clear, right, *bad = total
    assert inputs == clear + right >= 1400
    assert bad == [0, 0, 0]


def test_the_judge_sees_each_outcome(tmp_path: Path) -> None:
    """A judge that never finds anything would pass every input."""

    def fails(folder: Path) -> None:
        raise KeyError("x")

    def overwrites(folder: Path) -> str:
        (folder / "there").write_text("other")
        return "taken"

    def prepare(folder: Path) -> None:
        (folder / "there").write_text("kept")

    def outcome_of(act, fault=lambda taken: None) -> str:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return judge(Case("t", "n", prepare, act, fault), folder).outcome.name

    assert outcome_of(fails) == "TRACEBACK"
    assert outcome_of(overwrites) == "DAMAGED"
    assert outcome_of(lambda folder: 1) == "RIGHT"
    assert outcome_of(lambda folder: 1, lambda taken: "not 2") == "WRONG"
    assert outcome_of(lambda folder: 1, fails) == "WRONG"
