# SPDX-License-Identifier: Apache-2.0
"""How much memory of this machine a run may take."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path("/")


class _Names(NamedTuple):
    """Files in which Linux tells of a control group, and the entry of the last one with copies of the disk."""

    most: str
    used: str
    statistics: str
    given_back: str


V2 = _Names("memory.max", "memory.current", "memory.stat", "inactive_file")
V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")


class _Bound(NamedTuple):
    """Bytes that all processes of a group may take, and that are left of them."""

    most: int
    left: int


def all_bytes(root: Path = ROOT) -> int:
    """Memory of the machine, or what this process's container or batch job may take of it if that is less."""
    return min([int(psutil.virtual_memory().total), *(bound.most for bound in _bounds(root))])


def free_bytes(root: Path = ROOT) -> int:
    """Memory that processes could take now: the machine's, or what is left of the container's or job's if that is
    less."""
    return min([int(psutil.virtual_memory().available), *(bound.left for bound in _bounds(root))])


def _bounds(root: Path) -> Iterator[_Bound]:
    """Of the control groups that this process is in, one within the other, as Docker, Kubernetes and Slurm set them."""
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else []:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = root / "sys/fs/cgroup", V2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", V1
        else:
            continue
        within = top / path.lstrip("/")  # in a container it may be the host's, of which only the top is there
        for group in (within, *within.parents):
            if (bound := _bound(group, names)) is not None:
                yield bound
            if group == top:
                break


def _bound(group: Path, names: _Names) -> _Bound | None:
    """None where it has none."""
    file = group / names.most
    if not file.is_file() or (text := file.read_text().strip()) == "max":
        return None
    rows = (line.split() for line in (group / names.statistics).read_text().splitlines())
    files = {name: int(size) for name, size in rows}.get(names.given_back, 0)  # a copy of the disk: given back at need
    most, used = int(text), int((group / names.used).read_text())
    return _Bound(most, max(most - used + files, 0))
