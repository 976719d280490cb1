# SPDX-License-Identifier: Apache-2.0
"""A run recorded in a user's repository is done again from its commit, its patch and its data; two runs make a page."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE
from tests.support.platform_helpers import Workspace

ROOT = Path(__file__).parents[2]
ROOT_FILES = ("flows", "tasks", "models")
REPRODUCE = """
import sys
from flows.reproduce import reproduce

sys.executable = sys.argv[2]
state = reproduce(sys.argv[1], iterations=2, return_state=True)
print(state.type.value, state.message)
"""
"""With a `python` for what it starts."""
NEVER_MADE = "outs:\n- md5: 0a000000000000000000000000000000\n  size: 1\n  hash: md5\n  path: pairs.parquet\n"
"""An output that the repository knows and this clone never made, as the quickstart makes no pairs."""
COMPARE = "import sys; from flows.compare import compare; print(compare(sys.argv[1], sys.argv[2]))"
SETTINGS = ("trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.save_freq=0")


def command(workspace: Workspace, *arguments: str) -> None:
    result = subprocess.run(arguments, cwd=workspace.folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def repository(workspace: Workspace, forked_python: Path, worker_forks: str) -> Workspace:
    """The workspace as a repository of its own: the code under git, the data under DVC."""
    workspace = workspace.forking(worker_forks)
    for name in ROOT_FILES:
        shutil.copytree(ROOT / name, workspace.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (workspace.folder / ".gitignore").write_text("runs\nmlruns\nmlflow.db\n__pycache__\ndownloaded\n")
    workspace.environment["PYTHONPATH"] = str(workspace.folder)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    dvc = (str(forked_python), "-m", "dvc")
    command(workspace, *git, "init", "--quiet")
    command(workspace, *dvc, "init", "--quiet")
    command(workspace, *dvc, "add", "--quiet", "data/prompts.parquet", "data/embeddings", "data/base_model")
    (workspace.folder / "data/pairs.parquet.dvc").write_text(NEVER_MADE)
    command(workspace, *git, "add", ".")
    command(workspace, *git, "commit", "--quiet", "-m", "all")
    return workspace


@pytest.mark.slow
def test_a_run_of_changed_code_is_reproduced_bit_for_bit(repository: Workspace, forked_python: Path) -> None:
    """The change is not committed: without the patch the reward would be another one."""
    reward = repository.folder / "tasks/rewards/jpeg.py"
    committed = reward.read_text()
    reward.write_text(committed.replace("QUALITY = 95", "QUALITY = 60"))
    repository.train(*SETTINGS)
    reward.write_text(committed)
    (run,) = repository.mlflow_runs()
    inputs = {item.dataset.name for item in run.inputs.dataset_inputs}
    assert inputs == {"data/prompts.parquet", "data/embeddings", "data/base_model"}

    output = repository.run("-c", REPRODUCE, run.info.run_id, str(forked_python))
    assert re.search(r"COMPLETED \d+ equal, 0 within tolerance, 0 different", output), output[-2000:]
    again = next(r for r in repository.mlflow_runs() if "doubleflow.reproduces" in r.data.tags)
    assert again.data.tags["doubleflow.reproduces"] == run.info.run_id
    report = json.loads(
        Path(repository.client().download_artifacts(again.info.run_id, "reproduction.json")).read_text()
    )
    outcomes = {row["metric"]: row for row in report["metrics"]}
    assert outcomes["critic/rewards/mean"]["steps"] == 2
    assert {"val/reward/mean", "actor/grad_norm", "sync/canary_difference"} <= outcomes.keys()
    worktrees = subprocess.check_output(["git", "worktree", "list"], cwd=repository.folder, text=True)
    assert len(worktrees.splitlines()) == 1

    page = repository.run("-c", COMPARE, run.info.run_id, again.info.run_id).splitlines()[-1]
    html = Path(page).read_text()
    assert "trainer.total_training_steps" in html  # what differs between the two
    assert "actor_rollout_ref.rollout.n<" not in html  # what does not
    assert html.count("data:image/webp;base64,") >= 4  # grids
    assert html.count("<polyline") >= 4  # curves
    assert "compare" in {item.path for item in repository.client().list_artifacts(run.info.run_id)}

    cached = re.search(r"md5: (\w\w)(\w+)", (repository.folder / "data/prompts.parquet.dvc").read_text())
    assert cached is not None
    (repository.folder / ".dvc/cache/files/md5" / cached[1] / cached[2]).unlink()
    failed = repository.start("-m", "flows.reproduce", run.data.tags["doubleflow.run_name"])
    assert failed.wait(PATIENCE) == 1
    said = [line for line in failed.output().splitlines() if line.startswith("error: ")]
    assert "`python -m dvc checkout data/" in said[0]
    assert "Checkout failed for following targets: data/prompts.parquet" in said[0]
    assert "Traceback" not in failed.output()
