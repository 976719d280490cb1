# SPDX-License-Identifier: Apache-2.0
"""The point of it all: the recipe `flow-grpo`, shortened, makes held-out pictures better."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import ttest_rel

from tests.support.patience import PATIENCE
from tests.support.platform_helpers import Workspace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workspace_of_digits(tmp_path: Path, prefect_server: dict[str, str]) -> Workspace:
    """The project's recipe and data; the data stages run if they have not (about three minutes on two cores)."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the stages call `python`
    command = [sys.executable, "-m", "dvc", "repro", "--quiet", "embeddings", "base_model"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, check=True, timeout=PATIENCE)
    folder = tmp_path / "digits"
    folder.mkdir()
    shutil.copy(ROOT / "prefect.yaml", folder)
    (folder / "data").symlink_to(ROOT / "data")
    return Workspace(folder, dict(prefect_server))


@pytest.mark.slow
def test_sixteen_iterations_raise_the_held_out_reward(workspace_of_digits: Workspace) -> None:
    """Paired over the 48 held-out prompts, same noise before and after; one-sided, p < 0.01."""
    changes = ("trainer.total_training_steps=16", "trainer.test_freq=0", "actor_rollout_ref.rollout.val_kwargs.n=4")
    workspace_of_digits.run("-m", "flows.train", "flow-grpo", *[word for c in changes for word in ("--set", c)])
    (run,) = workspace_of_digits.mlflow_runs()
    client = workspace_of_digits.client()
    before, after = (
        pd.read_parquet(client.download_artifacts(run.info.run_id, f"validation/{step:06d}.parquet"))
        .groupby("uid")["reward"]
        .mean()
        for step in (0, 16)
    )
    assert len(before) == 48
    assert before.index.equals(after.index)
    assert 0.4 < before.mean() < 0.65
    assert ttest_rel(after, before, alternative="greater").pvalue < 0.01
