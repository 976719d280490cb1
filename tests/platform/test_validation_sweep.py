# SPDX-License-Identifier: Apache-2.0
"""A validation sweep whose MLflow server does not answer while it measures: what was drawn is not lost by that."""

import re
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.config.tracking import TrackingConfig
from tasks.records.model_registry import LEFT_OUT, register
from tasks.records.tracking import Tracker
from tests.platform.test_opening import SWEEP
from tests.support.lost_answers import lost_answers
from tests.support.platform_helpers import RECIPE, RayHead, Workspace, mlflow_served_in

FILES = rb"mlflow-artifacts/artifacts/\S*(transformer/\S*\.safetensors|\.parquet)"
ASKED = re.compile(rb"GET \S*/(" + FILES + rb"|registered-models/alias\S*) ")
"""A version's weights, the base model's measurement, and the champion."""


def score_by_others(client: MlflowClient, experiment: str) -> None:
    """All that is measured counts as scored by versions of the rewards that are no more."""
    for run in client.search_runs([experiment], "tags.`doubleflow.subject` != ''"):
        assert len(run.data.tags["doubleflow.reward_versions"]) == 12
        client.set_tag(run.info.run_id, "doubleflow.reward_versions", "others")


def test_a_sweep_asks_again_for_lost_answers_and_measures_anew_what_other_rewards_scored(
    workspace: Workspace, ray_head: RayHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = str(RECIPE["trainer"]["experiment_name"]), workspace.folder / "server"
    folder.mkdir()
    with mlflow_served_in(folder) as port, lost_answers("127.0.0.1", port, ASKED) as lossy:
        client = MlflowClient(f"http://127.0.0.1:{port}")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)  # which goes before the config, and others set
        trained = Tracker(TrackingConfig(uri=client.tracking_uri), "trained")
        other = workspace.folder / "other"
        other.mkdir()
        (other / "pytorch_lora_weights.safetensors").write_bytes(b"a LoRA's, which another config trained")
        register(trained, name, other, 5, {})
        register(trained, name, workspace.folder / "data/base_model", 10, {})
        workspace.environment.update(ray_head.joined | {"MLFLOW_TRACKING_URI": lossy.address})
        output = workspace.run("-c", SWEEP)
        (measured,) = client.search_runs([trained.experiment_id], f"tags.`doubleflow.subject` = '{name}/2'")
        left_out = client.get_model_version(name, "1").tags[LEFT_OUT]
        kinds = {Path(path.partition("?")[0]).suffix or "champion" for path in lossy.lost}
        score_by_others(client, trained.experiment_id)
        client.set_registered_model_alias(name, "champion", "2")
        register(trained, name, workspace.folder / "data/base_model", 15, {})
        workspace.run("-c", SWEEP)
        runs = client.search_runs([trained.experiment_id], "tags.`doubleflow.subject` != ''")
        counted = Counter(run.data.tags["doubleflow.subject"] for run in runs)
    assert measured.info.status == "FINISHED", output[-2000:]
    assert left_out.partition(": ")[0] == measured.data.tags["doubleflow.measurement"]
    assert "weights is" in left_out
    assert measured.data.metrics["gain/base/mean"] == 0, output[-2000:]
    assert kinds == {".safetensors", ".parquet", "champion"}
    # The base and the champion once more: what they had by other rewards is not what version 3 is compared with.
    assert counted == {"base": 2, f"{name}/1": 1, f"{name}/2": 2, f"{name}/3": 1}
    assert all(any(name.startswith("reward.") for name in run.data.tags) for run in runs)
