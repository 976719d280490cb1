# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark's table stands in the docs."""

import re
from pathlib import Path


def put_table(page: Path, script: str, table: str) -> None:
    """Replace what stands between `<!-- benchmarks/<script> -->` and the next `<!-- end -->` of a page.

    Raises:
        ValueError: the page has no such place.
    """
    begin, end = f"<!-- benchmarks/{script} -->\n", "<!-- end -->\n"
    text, count = _place(script).subn(lambda _: f"{begin}{table}\n{end}", page.read_text())
    if count != 1:
        raise ValueError(f"{page} has {count} places {begin.strip()}: it must have one")
    page.write_text(text)


def kept_rows(page: Path, script: str, table: str) -> str:
    """The table with the rows that stand on the page and not in it, first: runs of other machines and days.

    A row is known by its first cell; the table's head must be the page's, else nothing is kept.
    """
    found = _place(script).search(page.read_text())
    (head, rule, *new), old = table.splitlines(), found.group(1).splitlines() if found else []
    if old[:1] != [head]:
        return table
    rows = {row.split(" | ")[0]: row for row in [*old[2:], *new]}
    return "\n".join([head, rule, *rows.values()])


def _place(script: str) -> re.Pattern[str]:
    return re.compile(f"<!-- {re.escape(f'benchmarks/{script}')} -->\n(.*?)<!-- end -->\n", re.DOTALL)
