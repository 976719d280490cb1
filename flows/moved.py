# SPDX-License-Identifier: Apache-2.0
"""MLflow's records of a project folder that was copied or moved lead to its own files: `python -m flows.moved OLD`."""

from pathlib import Path
from typing import Annotated

import typer

from tasks.cli.terminal import Debug, in_a_sentence, run_command
from tasks.records.moved_records import DATABASE, FILES, lead_here


def main(
    old: Annotated[Path, typer.Argument(help="Folder of files that the records lead to, as a run's refusal names it.")],
    debug: Debug = False,
) -> None:
    """Lead what mlflow.db has in another folder to mlruns in this one."""
    with in_a_sentence(debug):
        changed = lead_here(Path(), old.absolute())
        what = ", ".join(f"{count} {table.replace('_', ' ')}" for table, count in changed.items() if count)
        typer.echo(f"{DATABASE}: {what} have their files in {Path(FILES).resolve()} now")


if __name__ == "__main__":
    run_command(main)
