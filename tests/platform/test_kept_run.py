# SPDX-License-Identifier: Apache-2.0
"""A run of an earlier version, killed in its second iteration, is ended by the same command; see `tests/kept_run`."""

import json
import sqlite3
import tarfile
from pathlib import Path

import pytest

from tests.support.platform_helpers import RayHead, Workspace

KEPT = Path(__file__).parents[1] / "kept_run"
UNDISTURBED = json.loads((KEPT / "undisturbed.json").read_text())


@pytest.fixture
def kept(tmp_path: Path, prefect_server: dict[str, str], ray_head: RayHead) -> Workspace:
    """The user's folder, at another place than it was made in."""
    with tarfile.open(KEPT / "run.tar.xz") as archive:
        # The repository's own file; before Python 3.11.4 there is no filter.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    folder = tmp_path / "kept"
    with sqlite3.connect(folder / "mlflow.db") as store:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            store.execute(f"UPDATE {table} SET {column} = replace({column}, '/kept', ?)", [str(folder)])
    return Workspace(folder, dict(prefect_server)).on(ray_head)


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_where_it_was_killed(kept: Workspace) -> None:
    """In the same MLflow run, with the checkpoint's weights, optimiser and average and with the kept samples.

    Another processor may round in other places, so the metrics agree closely and not in every bit.
    """
    (before,), client = kept.mlflow_runs(), kept.client()
    assert before.info.status == "RUNNING"  # nobody was left to say otherwise
    recorded = client.get_metric_history(before.info.run_id, "actor/grad_norm")
    assert [point.step for point in recorded] == [1]
    kept.train()
    (after,) = kept.mlflow_runs()
    assert (after.info.run_id, after.info.status) == (before.info.run_id, "FINISHED")
    for name, expected in UNDISTURBED.items():
        found = {str(point.step): point.value for point in client.get_metric_history(after.info.run_id, name)}
        assert found == pytest.approx(expected, rel=0.01, abs=1e-5), name
    busy = {point.step: point.value for point in client.get_metric_history(after.info.run_id, "perf/rollout_busy_s")}
    assert busy[2] == 0.0, "the second iteration's samples are read, not made again"
    assert busy[3] > 0.0
    assert not [tag for tag in after.data.tags if tag.startswith("resumed.")]
    assert (kept.run_folder() / "checkpoints/iter_000003/state.json").is_file()
    assert (kept.run_folder() / "weights/pytorch_lora_weights.safetensors").is_file()
