# SPDX-License-Identifier: Apache-2.0
"""What others run of the Makefile: continuous integration each part of it, the containers both environments."""

import json
import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def ci_targets() -> set[str]:
    """What continuous integration makes, each job with all of its matrix."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    parts = {job: content.get("strategy", {}).get("matrix", {}).get("part", [""]) for job, content in jobs.items()}
    runs = {(job, step["run"]) for job, content in jobs.items() for step in content["steps"] if "run" in step}
    return {run.replace("${{ matrix.part }}", part).split()[1] for job, run in runs for part in parts[job]}


def test_continuous_integration_runs_each_part_of_the_tests_and_builds_the_docs() -> None:
    tests = re.search(r"^TESTS = (.+)$", MAKEFILE, re.MULTILINE)
    assert tests is not None
    # `check` is `lint` and the part `check-tests`.
    assert ci_targets() == {"lint", "check", "docs", *tests[1].split()} - {"check-tests"}


def test_the_containers_have_both_environments() -> None:
    """`make test` needs both: vLLM's packages cannot live in the environment of the others."""
    environments = {f"{path}/.dev" for path in re.findall(r"^(?:VLLM_)?VENV \?= (\S+)$", MAKEFILE, re.MULTILINE)}
    assert environments == {".venv/.dev", ".venv-vllm/.dev"}
    dockerfile = (ROOT / "Dockerfile").read_text()
    targets = dict(re.findall(r"^FROM base AS (\w+)\nRUN make (.+)$", dockerfile, re.MULTILINE))
    assert {target for made in targets.values() for target in made.split()} == environments
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert f"FROM python:3.11-slim-bookworm AS {container['build']['target']}\n" in dockerfile
    commands = container["postCreateCommand"].split(" && ")
    assert {
        target for command in commands if command.startswith("make ") for target in command.split()[1:]
    } == environments


def test_git_takes_no_environment_for_a_new_file_also_where_it_is_a_link(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    (tmp_path / ".venv").symlink_to("/usr")
    status = ["git", "status", "--porcelain", "--untracked-files=normal"]
    new = subprocess.run(status, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert new.stdout.split() == ["??", ".gitignore"]
