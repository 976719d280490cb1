# SPDX-License-Identifier: Apache-2.0
"""MLflow's database of a project folder that was copied or moved: it leads to files in the folder that it was made in.

MLflow writes down whole paths. Without a word a run in the copy would add its pictures and tables to the original's.
"""

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

from models.errors import DoubleflowError

DATABASE, FILES = "mlflow.db", "mlruns"
"""A project's own, as `tracking.uri` has the one, and the folder that its runs' files are in."""
PLACES: Mapping[str, tuple[str, ...]] = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
"""Tables of MLflow's and their columns that say where files are."""


class RecordsMoved(DoubleflowError, ValueError):
    """MLflow's records in this folder have their files in another one."""


def require_own_files(folder: Path) -> None:
    """Raise RecordsMoved where the folder's MLflow database leads to another folder, as that of a copy does."""
    there = files_of_others(folder)
    if there is not None:
        here = (folder / FILES).resolve()
        raise RecordsMoved(
            f"MLflow's records in {folder / DATABASE} have their files in {there}, not in {here}: this folder was "
            f"copied or moved. `python -m flows.moved {quote(str(there))}` leads them to those in {FILES} here; "
            f"tracking.artifacts={there} lets a run go on with those there"
        )


def files_of_others(folder: Path) -> Path | None:
    """Where experiments have their files by default, if that is not the folder's own `mlruns` and they have some there.

    MLflow has the place of its first experiment from when the database was made. Places that somebody chose for an
    experiment are left alone.
    """
    database = folder / DATABASE
    if not database.is_file():
        return None
    with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as store:
        try:
            found = dict(store.execute("SELECT experiment_id, artifact_location FROM experiments").fetchall())
        except sqlite3.DatabaseError:  # of no MLflow: it says so itself
            return None
    first = _path_of(str(found.pop(0, "")))
    if first is None or _is_same(there := first.parent, folder / FILES):
        return None
    return there if any(_path_of(str(place)) == there for place in found.values()) else None


def lead_here(folder: Path, there: Path) -> dict[str, int]:
    """Make what the folder's database has in `there` that of the folder's own `mlruns`; table -> rows.

    Raises:
        RecordsMoved: there is no database, there are no files, or nothing in it leads there.
    """
    for name in (DATABASE, FILES):
        if not (folder / name).exists():
            raise RecordsMoved(f"{folder / name} is missing: run this in the folder that was copied or moved, whole")
    here = (folder / FILES).resolve()
    with closing(sqlite3.connect(folder / DATABASE)) as store, store:
        changed = {
            table: max(_replace(store, table, column, there, here) for column in columns)
            for table, columns in PLACES.items()
        }
    if not any(changed.values()):
        raise RecordsMoved(
            f"nothing in {folder / DATABASE} leads to {there}: give the folder that a run's refusal names"
        )
    return changed


def _replace(store: sqlite3.Connection, table: str, column: str, there: Path, here: Path) -> int:
    """In how many rows the column led there, as a path or as its URI; now it leads here."""
    changed = 0
    for old, new in ((there.as_uri(), here.as_uri()), (str(there), str(here))):
        rows = store.execute(
            f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} = ? OR substr({column}, 1, ?) = ?",
            (new, len(old) + 1, old, len(old) + 1, f"{old}/"),
        )
        changed += rows.rowcount
    return changed


def _path_of(place: str) -> Path | None:
    """Of a place on this machine, as MLflow writes it: a path, or its URI; None for any other, and for none."""
    parts = urlsplit(place)
    return Path(unquote(parts.path) if parts.scheme else place) if place and parts.scheme in ("", "file") else None


def _is_same(one: Path, other: Path) -> bool:
    """Also by another name of the same folder."""
    if one.exists() and other.exists():
        return os.path.samefile(one, other)
    return one == other.resolve()
