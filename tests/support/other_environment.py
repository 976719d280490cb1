# SPDX-License-Identifier: Apache-2.0
"""A second Python environment beside the one of the tests, with its packages and some that are there alone."""

import sys
import venv
from collections.abc import Mapping
from pathlib import Path


def make_environment(folder: Path, modules: Mapping[str, str], own_packages: bool = True) -> Path:
    """Its interpreter, a link to this one's.

    Args:
        folder: is created.
        modules: path below its site-packages -> source.
        own_packages: it has the packages of this environment, too.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, source in modules.items():
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_text(source)
    if own_packages:
        there = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (packages / "own.pth").write_text("\n".join(there))
    return folder / "bin" / "python"
