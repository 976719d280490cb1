"""The deployment on a real server and a real worker."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import yaml
from platform_helpers import Workspace, background, make_workspace, wait_until

FAST = {"trainer": {"total_training_steps": 1, "val_before_train": False}}


def prefect(workspace: Workspace, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """`prefect ...` in the workspace."""
    result = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
        cwd=workspace.folder,
        env=workspace.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not check or result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    return result


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, prepared: Path, prefect_server: dict[str, str]) -> Workspace:
    """The project's own prefect.yaml beside the tiny recipe, deployed to a pool of process workers."""
    workspace = make_workspace(tmp_path_factory.mktemp("deployed") / "workspace", prepared, prefect_server)
    root = Path(__file__).parents[2]
    file = workspace.folder / "prefect.yaml"
    tiny = yaml.safe_load(file.read_text())["deployments"]
    project = yaml.safe_load((root / "prefect.yaml").read_text())
    file.write_text(yaml.safe_dump(project | {"deployments": project["deployments"] + tiny}))
    (workspace.folder / "flows").symlink_to(root / "flows")
    workspace.environment["DOUBLEFLOW_HOME"] = str(workspace.folder)
    prefect(workspace, "work-pool", "create", "local", "--type", "process", "--overwrite")
    prefect(workspace, "deploy", "--all")
    return workspace


def api(workspace: Workspace, path: str, body: dict | list) -> list:
    """POST to the server; 503 is its word for a database that is busy, and asks to come again."""

    def answer() -> httpx.Response | None:
        response = httpx.post(f"{workspace.environment['PREFECT_API_URL']}/{path}", json=body, timeout=20)
        return None if response.status_code == 503 else response

    response = wait_until(answer, 60, f"an answer from {path}")
    assert response.is_success, response.text
    return response.json()


@pytest.mark.slow
def test_deployment_runs_under_a_worker_and_on_its_schedule(deployed: Workspace) -> None:
    worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "local"]
    log = deployed.folder / "worker.log"
    with background(worker, deployed.environment, log, deployed.folder):
        watched = prefect(
            deployed, "deployment", "run", "train/tiny", "--param", f"overrides={json.dumps(FAST)}", "--watch"
        )
        assert "Completed" in watched.stdout + watched.stderr
        (run,) = deployed.mlflow_runs()
        assert run.info.status == "FINISHED"

        # The second run is the scheduler's own: same config, so it continues the finished run at once.
        # The scheduler must see the schedule before its first moment comes; else it is the next one, a minute later.
        anchor = (datetime.now(UTC) + timedelta(seconds=20)).isoformat()
        schedule = {"schedule": {"interval": 60, "anchor_date": anchor}, "parameters": {"overrides": FAST}}
        (tiny,) = api(deployed, "deployments/filter", {"deployments": {"name": {"any_": ["tiny"]}}})
        api(deployed, f"deployments/{tiny['id']}/schedules", [schedule | {"active": True}])

        def scheduled_run_completed() -> bool:
            body = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
            return any(r["auto_scheduled"] for r in api(deployed, "flow_runs/filter", body))

        wait_until(scheduled_run_completed, 240, f"the scheduled run (worker log: {log})")


def test_bad_parameters_are_refused_when_the_run_is_created(deployed: Workspace) -> None:
    for bad, name in [
        ({"trainer": {"total_training_steps": 0}}, "total_training_steps"),
        ({"trainer": {"total_trainin_steps": 3}}, "total_trainin_steps"),
        ({"actor_rollout_ref": {"rollout": {"algo": {"sde_type": "ode"}}}}, "ode"),
    ]:
        result = prefect(
            deployed, "deployment", "run", "train/tiny", "--param", f"overrides={json.dumps(bad)}", check=False
        )
        assert result.returncode != 0
        assert name in result.stdout + result.stderr


def test_the_form_explains_every_parameter(deployed: Workspace) -> None:
    """What Prefect's page shows: a description for each field of the configuration."""
    (deployment,) = api(deployed, "deployments/filter", {"deployments": {"name": {"any_": ["quickstart"]}}})
    definitions = deployment["parameter_openapi_schema"]["definitions"]
    missing = [
        f"{section}.{name}"
        for section, schema in definitions.items()
        for name, field in schema.get("properties", {}).items()
        if "description" not in field
    ]
    assert "TrainConfig" in definitions
    assert not missing
