# SPDX-License-Identifier: Apache-2.0
"""Prefect's database for a test: a copy of one that Prefect made, whose tables take it four seconds."""

import functools
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.system.access import private_folder
from tests.support.forked import Program
from tests.support.patience import PATIENCE

KEPT = Path(__file__).parents[2] / ".doubleflow"
FILE = "prefect.db"


@functools.cache
def empty_database() -> Path:
    """A database with the tables of this Prefect, made once on a machine. To be copied only."""
    kept = private_folder(KEPT) / f"prefect-{version('prefect')}.db"
    if not kept.exists():
        with TemporaryDirectory(dir=KEPT) as name:
            home = Path(name)
            environment = os.environ | {"PREFECT_HOME": str(home)}
            upgrade = Program(
                ("-m", "prefect", "server", "database", "upgrade", "--yes"), home, environment, home / "log"
            )
            assert upgrade.wait(PATIENCE) == 0, upgrade.output()
            os.replace(home / FILE, kept)  # there is the whole file or none, whoever else makes it now
    return kept


def prefect_in(home: Path) -> dict[str, str]:
    """The variable that makes the folder Prefect's own, with a database whose tables are there."""
    if not (home / FILE).exists():
        shutil.copyfile(empty_database(), home / FILE)
    return {"PREFECT_HOME": str(home)}
