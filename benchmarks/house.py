# SPDX-License-Identifier: Apache-2.0
"""How the code is kept, in numbers: before it stood in rooms, and today; a table in docs/architecture.md.

    python -m benchmarks.house [--write]

What is counted there is held by tests/docs/test_house_numbers.py.
"""

import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.config_walk import count_moves
from benchmarks.docs import put_table
from tests import test_late_imports as late
from tests.docs import test_docstrings as docstrings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TIMES = 5
LINES = 300
BY_HAND = [
    ("files that a prompt passes", "44, read", "55 in an iteration", "`python -m benchmarks.prompt_walk`"),
    ("forms of a sample on a prompt's walk", "29", "26", "counted by hand, the list above"),
    ("`make check`, minutes on two quiet cores", "none", "1:43", "`time make check`, once installed"),
    ("`make test`, minutes after the install", "34 with it, in CI", "13:52", "`time make test`"),
]
"""What takes minutes to measure, or is counted by somebody who reads."""
Row = tuple[str, str, str, str]


def import_seconds(module: str) -> float:
    """Processor seconds, user and system, of importing a module in a new process: the median."""
    taken = []
    for _ in range(TIMES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(taken)


def shares_with_shapes() -> tuple[float, float]:
    """Public functions of tensors whose own docstring says shapes, and with those whose base's does."""
    found = list(docstrings.functions())
    parents = docstrings.classes(*(path.read_text() for floor in docstrings.FLOORS for path in sources(floor)))
    own = sum(function.says_shapes for function in found)
    return own / len(found), 1 - len(docstrings.without_shapes(found, parents)) / len(found)


def sources(*floors: str) -> Iterator[Path]:
    """The modules of these floors."""
    return (path for floor in floors for path in (ROOT / floor).rglob("*.py"))


def count_complex() -> int:
    """Functions above the limit of complexity in pyproject.toml, those that say they may be counted too."""
    command = [
        "ruff",
        "check",
        "--quiet",
        "--select",
        "C901",
        "--ignore-noqa",
        "--output-format",
        "concise",
        *late.FLOORS,
    ]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    return len(done.stdout.splitlines())


def counted() -> Iterator[Row]:
    """What, the number before the rooms, today's, and what shows it: what the source alone decides."""
    inside = {name: len(late.inside_functions(name)) for name in late.modules()}
    where = f"{sum(inside.values())} in {sum(map(bool, inside.values()))} files"
    held = "`tests/test_late_imports.py`"
    yield "imports inside functions", "84 in 36 files", where, held
    yield "of them what is neither heavy nor optional, or is there anyway", "23", f"{len(late.unneeded())}", held
    moves, upwards = count_moves()
    walk = "`python -m benchmarks.config_walk`"
    yield "the config's moves between floors", "36", f"{moves}", walk
    yield "of them upwards", "18", f"{upwards}", walk
    own, said = shares_with_shapes()
    shown = "`tests/docs/test_docstrings.py`"
    yield "public functions of tensors that say shapes", "42 %", f"{100 * own:.0f} %", shown
    yield "the same, or their base's method does", "55 %", f"{100 * said:.0f} %", shown
    yield "functions of a complexity above 10", "14, up to 16", f"{count_complex()}", "`C901` in `make lint`"
    long = sum(len(path.read_text().splitlines()) > LINES for path in sources(*late.FLOORS))
    files = len(list(sources(*late.FLOORS)))
    yield f"files above {LINES} lines", "6 of 162", f"{long} of {files}", "`python -m benchmarks.house`"


def timed() -> Row:
    """The same of what a machine's speed decides, too."""
    seconds = import_seconds("flows.train")
    shown = f"`python -m benchmarks.house`, median of {TIMES}"
    return "CPU seconds of `import flows.train`", "12.6", f"{seconds:.1f}", shown


def main(
    write: Annotated[bool, typer.Option("--write", help="Put the table into docs/architecture.md.")] = False,
) -> None:
    """Measure, which takes half a minute, and print the table."""
    rows = [("What", "Before the rooms", "Now", "Shown by"), ("---",) * 4, *counted(), timed(), *BY_HAND]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    typer.echo(table)
    if write:
        put_table(PAGE, "house.py", table)


if __name__ == "__main__":
    typer.run(main)
