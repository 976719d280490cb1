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
    ("log", "table"),
    [("words_algorithms", words_algorithms.table), ("time_to_reward", time_to_reward.table)],
)
def test_a_page_has_the_table_of_its_log(log: str, table: Callable[[Any], str]) -> None:
    curves = curves_of(read_lines([MEASURED / f"{log}.jsonl"]))
    assert curves
    assert table(curves) in (ROOT / "docs" / "words.md").read_text()


def test_what_the_page_says_of_another_base_model_is_in_its_log() -> None:
    row = words.table(curves_of(read_lines([MEASURED / "words_h100.jsonl"]))).splitlines()[2]
    assert row in (ROOT / "docs" / "words.md").read_text().splitlines()
    assert row.startswith("| words, base model of .481 | 0, 2 | 0.481 | 0.875, 0.870 | 0.875, 0.870 |")
