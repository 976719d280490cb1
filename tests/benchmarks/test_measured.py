# SPDX-License-Identifier: Apache-2.0
"""The tables of runs on GPUs are what the kept logs say."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import time_to_reward, words, words_algorithms
from benchmarks.followed_runs import curves_of, read_lines
from benchmarks.local_services import ROOT

MEASURED = ROOT / "benchmarks" / "measured"


@pytest.mark.parametrize(
    ("log", "table", "page"),
    [
        ("words_algorithms", words_algorithms.table, "words"),
        ("words_fewer_images", words_algorithms.table, "algorithms"),
        ("time_to_reward", time_to_reward.table, "words"),
    ],
)
def test_a_page_has_the_table_of_its_log(log: str, table: Callable[[Any], str], page: str) -> None:
    curves = curves_of(read_lines([MEASURED / f"{log}.jsonl"]))
    assert curves
    assert table(curves) in (ROOT / "docs" / f"{page}.md").read_text()


@pytest.mark.parametrize(
    ("log", "count", "first"),
    [
        ("words_h100", 7, "| words, base model of .481 | 0, 2 | 0.481 | 0.875, 0.870 | 0.875, 0.870 |"),
        ("words_h200", 1, "| words | 0, 1, 2 | 0.529 | 0.906, 0.893, 0.907 | 0.909, 0.912, 0.916 |"),
    ],
)
def test_what_the_page_says_of_the_words_is_in_its_log(log: str, count: int, first: str) -> None:
    rows = words.table(curves_of(read_lines([MEASURED / f"{log}.jsonl"]))).splitlines()[2:]
    assert set(rows) <= set((ROOT / "docs" / "words.md").read_text().splitlines())
    assert len(rows) == count
    assert rows[0].startswith(first)
