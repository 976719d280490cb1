# SPDX-License-Identifier: Apache-2.0
"""How much memory of this machine a run may take."""

from pathlib import Path

import psutil

GROUP = Path("/sys/fs/cgroup")
"""Where Linux tells a container what it may take (cgroup v2)."""


def all_bytes(group: Path = GROUP) -> int:
    """Memory of the machine, or what this process's container may take of it."""
    there, most = int(psutil.virtual_memory().total), group / "memory.max"
    bounded = most.is_file() and most.read_text().strip() != "max"
    return min(there, int(most.read_text())) if bounded else there


def free_bytes(group: Path = GROUP) -> int:
    """Memory that processes could take now: the machine's, or what is left of the container's if that is less."""
    there = int(psutil.virtual_memory().available)
    most = group / "memory.max"
    if not most.is_file() or most.read_text().strip() == "max":
        return there
    used = int((group / "memory.current").read_text())
    rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    files = {name: int(size) for name, size in rows}.get("inactive_file", 0)  # a copy of the disk: given back at need
    return min(there, max(int(most.read_text()) - used + files, 0))
