# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.bad_inputs`: all inputs, and the table of docs/security.md."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.bad_inputs.cases import GOOD, Outcome, judge
from benchmarks.bad_inputs.targets import TARGETS, all_cases
from benchmarks.docs import put_table

PAGE = Path(__file__).parents[2] / "docs/security.md"


def main(
    seed: Annotated[int, typer.Option(help="Of all inputs; the table is of 0.")] = 0,
    only: Annotated[str, typer.Option(help="Targets whose name has this in it; the docs stay as they are.")] = "",
    show: Annotated[bool, typer.Option(help="Print every outcome.")] = False,
) -> None:
    """Give every input to the code, print those that came to no good end, and write the table."""
    counts: dict[str, Counter[Outcome]] = {name: Counter() for name in TARGETS if only in name}
    if not counts:
        raise typer.BadParameter(f"no target's name has {only!r} in it; there are {', '.join(TARGETS)}")
    bad = 0
    for name in counts:
        for case in all_cases(name, seed):
            with tempfile.TemporaryDirectory(prefix="bad-inputs-") as folder:
                judged = judge(case, Path(folder))
            counts[name][judged.outcome] += 1
            bad += judged.outcome not in GOOD
            if show or judged.outcome not in GOOD:
                typer.echo(f"{judged.outcome.value}: {name}: {case.name!r:.300}: {judged.words!r:.500}")
    table = table_of(counts)
    typer.echo(table)
    if not only and seed == 0:
        put_table(PAGE, "bad_inputs", table)
    raise typer.Exit(1 if bad else 0)


def table_of(counts: dict[str, Counter[Outcome]]) -> str:
    """A row a target, and the sums."""
    rows = {name: [sum(found.values()), *(found[outcome] for outcome in Outcome)] for name, found in counts.items()}
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [
        "| Given to | Inputs | Clear error | Accepted, rightly | Raw traceback | Accepted, wrongly | File damaged |",
        "|---|---|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(map(str, row))} |" for name, row in rows.items()),
        f"| **all** | {' | '.join(f'**{number}**' for number in total)} |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
