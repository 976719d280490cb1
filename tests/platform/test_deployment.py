# SPDX-License-Identifier: Apache-2.0
"""The deployment on a real server and a real worker."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import httpx
import psutil
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deploy.deployed_run import start_run
from tasks.system.processes import runs
from tests.support.lost_answers import CREATES_RUN, lost_answers
from tests.support.patience import PATIENCE, post, wait_until
from tests.support.platform_helpers import RayHead, Workspace, make_workspace, run_as_forks, running
from tests.support.processes import words_of

FAST = {"trainer": {"total_training_steps": 1, "val_before_train": False}}


def prefect(workspace: Workspace, *arguments: str, check: bool = True) -> str:
    """What `prefect ...` prints in the workspace; it must succeed if `check`, and fail if not."""
    process = workspace.start("-m", "prefect", "--no-prompt", *arguments)
    code = process.wait(PATIENCE)
    assert (code == 0) == check, process.output()[-5000:]
    return process.output()


@pytest.fixture(scope="module")
def deployed(
    tmp_path_factory: pytest.TempPathFactory, prepared: Path, prefect_server: dict[str, str], forked_python: Path
) -> Workspace:
    """The tiny recipe in the project's own prefect.yaml, deployed to a pool of process workers.

    `test_services.py` deploys all the others, and has the worker start Python where here is a fork.
    """
    workspace = make_workspace(tmp_path_factory.mktemp("deployed") / "workspace", prepared, prefect_server)
    root = Path(__file__).parents[2]
    file = workspace.folder / "prefect.yaml"
    (tiny,) = yaml.safe_load(file.read_text())["deployments"]
    run_as_forks(tiny, forked_python)
    project = yaml.safe_load((root / "prefect.yaml").read_text())
    file.write_text(yaml.safe_dump(project | {"deployments": [*project["deployments"], tiny]}))
    (workspace.folder / "flows").symlink_to(root / "flows")
    workspace.environment["DOUBLEFLOW_HOME"] = str(workspace.folder)
    prefect(workspace, "work-pool", "create", "local", "--type", "process", "--overwrite")
    prefect(workspace, "deploy", "--name", "tiny")
    return workspace


def api(workspace: Workspace, path: str, body: dict | list) -> list:
    """What the server answers to a POST."""
    return post(f"{workspace.environment['PREFECT_API_URL']}/{path}", body)


def actors() -> list[str]:
    """Titles of the cluster's actor processes; the daemons and idle workers are not among them.

    They are children of a process of these tests that forks.
    """
    titles = [" ".join(words_of(child)) for child in psutil.Process().children(recursive=True)]
    return [title for title in titles if title.startswith(("ray::Rollout", "ray::Reward", "ray::Trainer"))]


@pytest.mark.slow
def test_deployment_runs_under_a_worker(deployed: Workspace, ray_head: RayHead) -> None:
    """On a cluster that is there already, started in another folder, which stays as it was."""
    head = ray_head.process
    commands = {child.pid: " ".join(words_of(child)) for child in head.children()}
    daemons = {pid for pid, command in commands.items() if command and not command.startswith("ray::")}
    run_deployed(replace(deployed, environment=deployed.environment | ray_head.joined))
    wait_until(lambda: not actors(), "the release of the actors")
    assert daemons
    assert daemons <= {child.pid for child in head.children() if runs(child)}


@pytest.mark.slow
def test_without_an_address_a_run_has_a_cluster_of_its_own(ray_head: RayHead) -> None:
    """Ray by itself joins whatever `ray start` has left on the machine."""
    ask = "import ray; print(ray.get_runtime_context().gcs_address)"
    config = "RayConfig(forked_workers=False)"
    ours = f"from tasks.actors.cluster import RayConfig, ray_cluster\nwith ray_cluster({config}): {ask}"
    raw = f"import ray; ray.init(); {ask}"
    addresses = [
        subprocess.check_output(
            [sys.executable, "-c", code], env=os.environ | ray_head.seen, text=True, timeout=PATIENCE
        )
        for code in (raw, ours)
    ]
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    there = int(ray_head.joined["RAY_ADDRESS"].rpartition(":")[2])
    assert ports[0] == there
    assert ports[1] != there


def run_deployed(deployed: Workspace) -> None:
    """By hand; `test_services.py` waits for a schedule."""
    with running(deployed.start("-m", "prefect", "worker", "start", "--pool", "local")) as worker:
        overrides = ("--param", f"overrides={json.dumps(FAST)}")
        watching = deployed.start(
            "-m", "prefect", "--no-prompt", "deployment", "run", "train/tiny", *overrides, "--watch"
        )
        wait_until(lambda: len(actors()) == 3, f"the actors' start on the cluster (worker log: {worker.log})")
        wait_until(lambda: completed(deployed), f"the run (worker log: {worker.log})")
        (run,) = deployed.mlflow_runs()
        assert run.info.status == "FINISHED"
        assert watching.wait(PATIENCE) == 0
        said = " ".join(watching.output().split())
        assert "iteration 1/1: reward" in said
        assert re.search(r"held-out [\d.]+ -> [\d.]+ after 1 iterations; weights runs/\S+, models:/tiny/1", said)


def test_a_run_is_created_once_also_where_the_answer_to_it_is_lost(deployed: Workspace) -> None:
    """Two of one config would want the same folder, and the one that is followed could be the one that is refused."""
    server = httpx.URL(deployed.environment["PREFECT_API_URL"])
    tiny = {"deployments": {"name": {"any_": ["tiny"]}}}
    before = {run["id"] for run in api(deployed, "flow_runs/filter", tiny)}
    with (
        lost_answers(server.host, server.port, CREATES_RUN) as lossy,
        temporary_settings({PREFECT_API_URL: f"{lossy.address}/api"}),
    ):
        run = start_run("train/tiny", {})
    created = {run["id"] for run in api(deployed, "flow_runs/filter", tiny)} - before
    with temporary_settings({PREFECT_API_URL: str(server)}), get_client(sync_client=True) as client:
        for one in created:  # nobody is to run it; a busy server answers 503, and the client asks again
            client.delete_flow_run(UUID(one))
    assert len(lossy.lost) == 1
    assert created == {str(run.id)}


def completed(deployed: Workspace) -> bool:
    """Has a run of the deployment been completed?"""
    body = {"deployments": {"name": {"any_": ["tiny"]}}, "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    return bool(api(deployed, "flow_runs/filter", body))


def test_bad_parameters_are_refused_when_the_run_is_created(deployed: Workspace) -> None:
    """By the server, whoever asks it; and how the command line says it."""
    (deployment,) = api(deployed, "deployments/filter", {"deployments": {"name": {"any_": ["tiny"]}}})
    create = f"{deployed.environment['PREFECT_API_URL']}/deployments/{deployment['id']}/create_flow_run"
    for bad, name in [
        ({"trainer": {"total_training_steps": 0}}, "total_training_steps"),
        ({"trainer": {"total_trainin_steps": 3}}, "total_trainin_steps"),
        ({"algorithm": {"name": "grpo"}}, "grpo"),
        ({"actor_rollout_ref": {"rollout": {"algo": {"sde_window_mode": "ode"}}}}, "ode"),
        ({"trainer": {"total_training_steps": "many"}}, "'many' is not of type 'integer'"),
    ]:
        with pytest.raises(AssertionError, match=name):
            post(create, {"parameters": {"overrides": bad}})
    said = prefect(deployed, "deployment", "run", "train/tiny", "--param", f"overrides={json.dumps(bad)}", check=False)
    assert name in " ".join(said.split()), "the terminal's width breaks lines"


def test_the_form_explains_every_parameter(deployed: Workspace) -> None:
    """What Prefect's page shows: a description for each field of the configuration."""
    (deployment,) = api(deployed, "deployments/filter", {"deployments": {"name": {"any_": ["tiny"]}}})
    definitions = deployment["parameter_openapi_schema"]["definitions"]
    missing = [
        f"{section}.{name}"
        for section, schema in definitions.items()
        for name, field in schema.get("properties", {}).items()
        if "description" not in field
    ]
    assert "TrainConfigOverride" in definitions
    assert not missing
