# SPDX-License-Identifier: Apache-2.0
"""The numbers of docs/architecture.md about how the code is kept are today's, as `benchmarks.house` counts them."""

import re

import pytest

from benchmarks.docs import table_of
from benchmarks.house import PAGE, Row, counted

GROWING = ("imports inside functions", "files above 300 lines")
SHARE, FEW = 0.05, 2
"""How far from today's a number may be that many a change moves; the others are what they are."""


def is_todays(row: Row, said: Row) -> bool:
    """Is a row of the page this one?"""
    what, before, now, shown = row
    here, there = ([int(number) for number in re.findall(r"\d+", text)] for text in (now, said[2]))
    same_words = re.sub(r"\d+", "#", now) == re.sub(r"\d+", "#", said[2])
    near = all(abs(a - b) <= max(FEW, SHARE * a) for a, b in zip(here, there, strict=False))
    return (
        (what, before, shown) == (said[0], said[1], said[3])
        and same_words
        and (near if what in GROWING else now == said[2])
    )


def test_the_page_has_what_is_counted_today() -> None:
    rows = (tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table_of(PAGE, "house.py"))
    page = {what: (what, before, now, shown) for what, before, now, shown in rows}
    old = [(row, page.get(row[0])) for row in counted() if row[0] not in page or not is_todays(row, page[row[0]])]
    assert not old, "`python -m benchmarks.house --write` puts today's numbers into docs/architecture.md"


@pytest.mark.parametrize(
    ("now", "said", "right"),
    [
        ("113 in 52 files", "113 in 52 files", True),
        ("113 in 52 files", "108 in 50 files", True),
        ("113 in 52 files", "107 in 52 files", False),
        ("113 in 52 files", "113 in 49 files", False),
        ("113 in 52 files", "113", False),
    ],
)
def test_a_number_that_grows_may_be_a_twentieth_off(now: str, said: str, right: bool) -> None:
    assert is_todays((GROWING[0], "1", now, "a"), (GROWING[0], "1", said, "a")) == right
    assert is_todays(("others", "1", now, "a"), ("others", "1", said, "a")) == (now == said)
