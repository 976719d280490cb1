# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark's table stands in the docs, and whether the logs are there that it is made of."""

import re
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path


def put_table(page: Path, script: str, table: str) -> None:
    """Replace what stands between `<!-- benchmarks/<script> -->` and the next `<!-- end -->` of a page.

    Raises:
        ValueError: the page has no such place.
    """
    before, _, after = _place(page, script)
    page.write_text(f"{before}{table}\n{after}")


def table_of(page: Path, script: str) -> list[str]:
    """The lines of the table that stands there, its head first; none where there is no table yet.

    Raises:
        ValueError: the page has no such place.
    """
    return [line for line in _place(page, script)[1].splitlines() if line.startswith("|")]


def rows_by_name(page: Path, script: str) -> dict[str, str]:
    """First cell -> row of the table that stands there; errors as of `table_of`."""
    return {row.split(" | ")[0].removeprefix("| "): row for row in table_of(page, script)[2:]}


def refuse_missing(parser: ArgumentParser, logs: Iterable[Path]) -> None:
    """End with a sentence where a table is to be made of a log that is not there: it would lose its rows."""
    for log in logs:
        if not log.is_file():
            parser.error(f"there is no log {log}")


def _place(page: Path, script: str) -> tuple[str, str, str]:
    """A page until the place of a script's table, what stands there, and the rest."""
    begin, end = f"<!-- benchmarks/{script} -->\n", "<!-- end -->\n"
    parts = re.split(f"(?<={re.escape(begin)})(.*?)(?={re.escape(end)})", page.read_text(), flags=re.DOTALL)
    if len(parts) != 3:
        count = len(parts) // 2
        raise ValueError(f"{page} has {count} places {begin.strip()}: it must have one")
    return parts[0], parts[1], parts[2]
