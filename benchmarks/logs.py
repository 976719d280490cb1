# SPDX-License-Identifier: Apache-2.0
"""The logs of benchmarks: a line of JSON for each thing that was measured."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def rows_in(log: Path) -> list[dict[str, Any]]:
    """The log's lines in their order; none where it is not there yet."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []


def keep_settings(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Have the lines of `--work`, a folder, share these arguments: what is measured there already would stand for other
    work.

    Raises:
        SystemExit: it has lines of another, with a sentence.
    """
    folder: Path = arguments.work
    file, present = folder / "settings.json", {name: str(getattr(arguments, name)) for name in names}
    if file.is_file() and (before := json.loads(file.read_text())) != present:
        other = [f"--{name} {before.get(name)}" for name, value in present.items() if before.get(name) != value]
        raise SystemExit(f"error: {folder} has what was measured with {', '.join(other)}: give another as --work")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(present))
