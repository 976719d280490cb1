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
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text, count = pattern.subn(lambda _: f"{begin}{table}\n{end}", page.read_text())
    if count != 1:
        raise ValueError(f"{page} has {count} places {begin.strip()}: it must have one")
    page.write_text(text)
