# SPDX-License-Identifier: Apache-2.0
"""What of a machine's memory is this process's to take: in a container, a batch job, and where nothing bounds it."""

from pathlib import Path

import psutil
import pytest

from tasks.system.host_memory import all_bytes, free_bytes

V1, V2 = "4:cpu,memory:/slurm/job_7\n0::/other\n", "0::/slurm/job_7\n"
MIB = 2**20


def machine(root: Path, own: str) -> Path:
    """A root whose Linux says of this process that its groups are these."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    return root


def bound(root: Path, group: str, most: str, used: int = 0, files: int = 0) -> None:
    """Have a group of the second version take at most so much."""
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {files}\n")


def test_nothing_bounds_it(tmp_path: Path) -> None:
    whole = psutil.virtual_memory().total
    assert all_bytes(tmp_path) == whole, "no Linux says so"
    assert 0 < free_bytes(tmp_path) <= whole
    root = machine(tmp_path, V2)
    assert all_bytes(root) == whole
    bound(root, "slurm/job_7", "max")
    bound(root, "slurm/another", "9")
    bound(root, "", "9223372036854771712")
    assert all_bytes(root) == whole
    assert 0 < free_bytes(root) <= whole


@pytest.mark.parametrize("group", ["slurm/job_7", "slurm", ""], ids=["its own", "the one around", "a container's"])
def test_a_group_or_one_around_it_bounds_it(tmp_path: Path, group: str) -> None:
    """Copies of files are given back at need."""
    root = machine(tmp_path, V2)
    bound(root, group, str(9 * MIB), used=5 * MIB, files=MIB)
    assert (all_bytes(root), free_bytes(root)) == (9 * MIB, 5 * MIB)
    bound(root, "slurm/job_7/within", str(MIB))  # not this process's
    bound(root, group, str(9 * MIB), used=10 * MIB)
    assert (all_bytes(root), free_bytes(root)) == (9 * MIB, 0)


def test_the_narrowest_counts(tmp_path: Path) -> None:
    """What others of the group around have taken is gone."""
    root = machine(tmp_path, V2)
    bound(root, "slurm/job_7", str(4 * MIB), used=MIB)
    bound(root, "slurm", str(8 * MIB), used=7 * MIB)
    assert (all_bytes(root), free_bytes(root)) == (4 * MIB, MIB)


def test_a_container_may_be_told_its_path_outside(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/../../kubepods/pod_3\n")
    bound(root, "", str(4 * MIB), used=MIB)
    assert (all_bytes(root), free_bytes(root)) == (4 * MIB, 3 * MIB)


def test_the_first_version_has_names_of_its_own(tmp_path: Path) -> None:
    root = machine(tmp_path, V1)
    folder = root / "sys/fs/cgroup/memory/slurm/job_7"
    folder.mkdir(parents=True)
    for name, text in (
        ("limit_in_bytes", f"{9 * MIB}\n"),
        ("usage_in_bytes", f"{5 * MIB}\n"),
        ("stat", f"total_cache 7\ntotal_inactive_file {2 * MIB}\n"),
    ):
        (folder / f"memory.{name}").write_text(text)
    assert (all_bytes(root), free_bytes(root)) == (9 * MIB, 6 * MIB)


def test_this_machine_says_something() -> None:
    assert 0 < free_bytes() <= all_bytes() <= psutil.virtual_memory().total
