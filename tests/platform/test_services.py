# SPDX-License-Identifier: Apache-2.0
"""`make up`; only who has the secret is answered; the schedule fires, the sweep judges, the automation reacts.

`make down` leaves nothing.
"""

import json
import re
import shutil
import sqlite3
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest
import yaml
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file

from tasks.config.tracking import TrackingConfig
from tasks.records.model_registry import CHAMPION, REGRESSION, register
from tasks.records.owner import FLOW_RUN
from tasks.records.tracking import Tracker
from tasks.system.ports import free_port
from tasks.system.processes import wait_until_ended
from tests.support.mlflow_store import mlflow_in
from tests.support.patience import post, wait_until
from tests.support.platform_helpers import RECIPE, Workspace, make_workspace, paths_below, run_as_forks
from tests.support.processes import kill_all, with_word, words_of

ROOT = Path(__file__).parents[2]
REACTIONS = ("compare", "close-dead-runs")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def shifted(base: Path, folder: Path, shift: float) -> Path:
    """The model with a constant velocity added: the larger it is, the plainer are the pictures."""
    shutil.copytree(base, folder)
    weights = load_file(folder / WEIGHTS)
    weights["proj_out.bias"] = weights["proj_out.bias"] + shift
    save_file(weights, folder / WEIGHTS)
    return folder


@pytest.fixture
def trained(
    tmp_path: Path, prepared: Path, prefect_server: dict[str, str], forked_python: Path, worker_forks: str
) -> Workspace:
    """A folder whose registry has three versions of one run: plain pictures, as the base model's, and in between."""
    workspace = make_workspace(tmp_path / "workspace", prepared, prefect_server)
    project = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (sweep,) = [d for d in project["deployments"] if d["name"] == "validation-sweep"]
    # In a minute, and then so rarely that on a busy machine, too, few of them have nothing to do.
    begun = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=59)
    sweep["schedules"] = [{"interval": 90, "anchor_date": begun.isoformat(), "timezone": "UTC"}]
    sweep["parameters"] = {
        "config": RECIPE,
        "measurement": {"seeds": [1, 2], "reward": {"functions": {"jpeg_compressibility": {}}}},
    }
    # What the automations start are forks: that the worker starts Python is seen by the sweep.
    for reaction in (d for d in project["deployments"] if d["name"] in REACTIONS):
        run_as_forks(reaction, forked_python)
    (workspace.folder / "prefect.yaml").write_text(yaml.safe_dump(project))
    for name in ("flows", "tasks", "models"):
        (workspace.folder / name).symlink_to(ROOT / name)
    artifacts = (workspace.folder / "mlruns").as_uri()
    tracking = TrackingConfig(uri=mlflow_in(workspace.folder), artifacts=artifacts)
    tracker = Tracker(tracking, "trained")
    for iteration, shift in ((10, 10.0), (20, 0.0), (30, 3.0)):
        folder = shifted(workspace.folder / "data/base_model", workspace.folder / f"export{iteration}", shift)
        register(tracker, "tiny", folder, iteration, {})
    return workspace.forking(worker_forks)


@pytest.mark.slow
def test_up_schedule_verdict_reaction_down(trained: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_port(), free_port()
    api, mlflow = f"http://127.0.0.1:{ports[0]}/api", f"http://127.0.0.1:{ports[1]}"
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "DVC_SITE_CACHE_DIR"):
        trained.environment.pop(name, None)
    del trained.environment["PREFECT_HOME"]  # which the Makefile sets, and a plain terminal does not
    services = ("-m", "flows.services")
    try:
        output = trained.run(
            *services, "up", "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1]), "--gpus", "3"
        )
        told = [line.split()[0] for line in output.splitlines()]
        assert told[:7] == ["prefect", "mlflow", "prefect", "mlflow", "pool", "worker", "up:"]
        assert f"export PREFECT_API_URL={api}" in output
        exported = dict(re.findall(r"^export (\w+)=(.*)$", output, re.MULTILINE))
        auth = tuple(exported["PREFECT_API_AUTH_STRING"].split(":", 1))
        for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
            monkeypatch.setenv(name, exported[name])
        secrets = [auth[1], exported["MLFLOW_TRACKING_PASSWORD"]]
        keep_needed(trained.folder / "prefect.yaml")
        automations = ids(api, "automations", auth)
        check_restart(trained, [*services, "up", "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1])])
        assert len(automations) == 3
        assert ids(api, "automations", auth) == automations, "made anew, though they were as they are"
        assert trained.run(*services, "status").count(" up") == 3
        limits = {entry["name"]: entry["limit"] for entry in post(f"{api}/v2/concurrency_limits/filter", {}, auth)}
        assert limits["local-gpus"] == 3
        assert (trained.folder / ".prefect/prefect.db").is_file(), "two checkouts would have one data base"
        record = json.loads((trained.folder / ".services/pids.json").read_text())
        pids = [pid for pid, *_ in record.values()]
        family = [process for pid in pids for process in (psutil.Process(pid), *psutil.Process(pid).children(True))]
        ghost = vanish(api, mlflow, auth)
        check_strangers(api, mlflow)
        check_secret_file(trained.folder, secrets)
        # Without what the worker runs, which comes and goes and whose Ray listens as Ray does: a schedule starts flows.
        inner = [child for name in ("prefect", "mlflow") for child in psutil.Process(record[name][0]).children(True)]
        servers = [*map(psutil.Process, pids), *inner]
        addresses = {c.laddr for p in servers for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
        assert {address.port for address in addresses} >= set(ports)
        assert {address.ip for address in addresses} == {"127.0.0.1"}, "a neighbour on the network reaches nothing"
        assert not [*with_word(servers, "huey"), *with_word(servers, "_job_runner")]

        judged = wait_until(
            lambda: runs(api, "validation-sweep", "COMPLETED", auth), "a scheduled sweep's verdict", every=2
        )
        (found,) = [run for run in judged if run["state"]["name"] == "Regression"]  # a later sweep has nothing to do
        assert found["auto_scheduled"]
        sentence = "tiny version 2 is worse than the best so far by -0."
        assert found["state"]["message"].startswith(sentence)
        # A thread of the run sends them, which ends after the run is said to be completed.
        wait_until(lambda: sentence in logs(api, found, auth), "the verdict among the run's logs", every=1)
        assert "Traceback" not in logs(api, found, auth)
        assert "unexpected exception" not in (trained.folder / ".services/worker.log").read_text()
        wait_until(lambda: runs(api, "compare", "COMPLETED", auth), "the automation's comparison", every=2)
        check_registry(MlflowClient(mlflow, mlflow))
        pages = list((trained.folder / "runs").glob("compare-*.html"))  # one for each regression, as far as they came
        assert pages
        assert all("jpeg_compressibility" in page.read_text() for page in pages)
        cards = post(f"{api}/artifacts/filter", {"artifacts": {"key": {"any_": ["compare-gains"]}}}, auth)
        assert cards
        assert all(f"]({mlflow}/#/experiments/" in card["data"] for card in cards)
        check_nowhere_written(trained.folder, secrets)
        wait_until(
            lambda: ghost in [run["id"] for run in runs(api, "train", "CRASHED", auth)], "a silent run's crash", every=2
        )
        closed = MlflowClient(mlflow, mlflow).search_runs
        wait_until(
            lambda: closed(["0"], "attributes.status = 'FAILED'"), "the end of a vanished run in MLflow", every=2
        )
        wait_until(lambda: runs(api, "validation-sweep", "RUNNING", auth), "the next scheduled sweep", every=2)
    finally:
        trained.run(*services, "down")
    check_nothing_runs(trained.folder)
    assert not wait_until_ended(family, 0)
    assert not (trained.folder / ".services").exists()


def ids(api: str, what: str, auth: tuple[str, str]) -> set[str]:
    """Of all that Prefect's server has of them."""
    return {entry["id"] for entry in post(f"{api}/{what}/filter", {}, auth)}


def keep_needed(file: Path) -> None:
    """Of the deployments, which are all made by now, those that the schedule and the automations start."""
    project = yaml.safe_load(file.read_text())
    project["deployments"] = [d for d in project["deployments"] if d["name"] in ("validation-sweep", *REACTIONS)]
    file.write_text(yaml.safe_dump(project))


def check_restart(workspace: Workspace, up: list[str]) -> None:
    """Of what died only that is started again, with the secrets of before; at other ports nothing is."""

    def pids() -> dict[str, int]:
        record = json.loads((workspace.folder / ".services/pids.json").read_text())
        return {name: entry[0] for name, entry in record.items()}

    before = pids()
    secrets = (workspace.folder / ".services/environment").read_text()
    assert "already up (prefect, mlflow, worker) at " in workspace.run("-m", "flows.services", "up", check=False)
    died = psutil.Process(before["mlflow"])
    family = [died, *died.children(recursive=True)]
    kill_all(family)
    wait_until_ended(family, 60)
    said = workspace.run(*up)
    assert [line.split()[0] for line in said.splitlines()][:4] == ["mlflow", "mlflow", "pool", "up:"]
    after = pids()
    assert {name for name in before if before[name] != after[name]} == {"mlflow"}
    assert (workspace.folder / ".services/environment").read_text() == secrets


def vanish(api: str, mlflow: str, auth: tuple[str, str]) -> str:
    """A run of a machine that is gone: a first heartbeat, a record in MLflow, and nothing any more. The flow run's id.

    `make up`'s automation needs a minute to miss it, in which the test goes on.
    """
    flow = post(f"{api}/flows/", {"name": "train"}, auth)["id"]
    state = {"type": "RUNNING", "name": "Running"}
    run = post(f"{api}/flow_runs/", {"flow_id": flow, "state": state}, auth)["id"]
    event = {
        "occurred": datetime.now(UTC).isoformat(),
        "event": "prefect.flow-run.heartbeat",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [],
        "id": str(uuid4()),
    }
    post(f"{api}/events", [event], auth)
    MlflowClient(mlflow, mlflow).create_run("0", run_name="vanished", tags={FLOW_RUN: run})
    return run


def check_nothing_runs(folder: Path) -> None:
    """A flow run that `down` interrupted, in a process or on its way into one, is no longer called running."""
    with closing(sqlite3.connect(folder / ".prefect/prefect.db")) as prefect:
        found = prefect.execute("SELECT state_type FROM flow_run WHERE flow_run.work_queue_id IS NOT NULL").fetchall()
    assert not {("PENDING",), ("RUNNING",), ("CANCELLING",)} & set(found)
    with closing(sqlite3.connect(folder / "mlflow.db")) as mlflow:
        names = mlflow.execute("SELECT name FROM runs WHERE status = 'RUNNING'").fetchall()
    assert {name for (name,) in names} <= {"trained"}  # which the test itself holds open


def check_strangers(api: str, mlflow: str) -> None:
    """Another user of the machine, and a page that a browser has open, get nothing from either server."""
    experiments = f"{mlflow}/api/2.0/mlflow/experiments/search"
    page = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    rebound = page | {"Host": "rebound.evil.example"}
    near = {"Origin": "http://localhost:9999", "Content-Type": "text/plain"}  # another user's server on this machine
    for headers in ({"Content-Type": "application/json"}, page, rebound, near):
        for address in (f"{api}/flows/filter", f"{api}/work_pools/", experiments):
            for auth in (None, ("doubleflow", "guessed")):
                refused = httpx.post(address, content='{"max_results": 1, "name": "x"}', headers=headers, auth=auth)
                assert refused.status_code == 401, (address, headers, refused.text)
                assert "access-control-allow-origin" not in refused.headers
    for address in (f"{api}/admin/settings", f"{mlflow}/", f"{mlflow}/ajax-api/3.0/mlflow/assistant/config"):
        assert httpx.get(address).status_code == 401
    ask = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    for address in (f"{api}/flows/filter", experiments):
        assert "access-control-allow-origin" not in httpx.options(address, headers=ask).headers


def check_secret_file(folder: Path, secrets: list[str]) -> None:
    """Its owner alone reads it and enters its folder, and no command line shows it."""
    file = folder / ".services/environment"
    assert all(secret in file.read_text() for secret in secrets)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert (folder / ".doubleflow").stat().st_mode & 0o777 == 0o700
    commands = [" ".join(words_of(process)) for process in psutil.process_iter()]  # some end while they are looked at
    assert any("mlflow" in command for command in commands)
    assert not [command for command in commands for secret in secrets if secret in command]


def check_nowhere_written(folder: Path, secrets: list[str]) -> None:
    """Neither MLflow, Prefect's data base, the runs' folders nor the logs hold the secrets."""
    texts: dict[Path, bytes] = {}
    for path in paths_below(folder):
        if path.is_file() and not path.is_symlink() and path.name != "environment":
            with suppress(FileNotFoundError):  # the servers go on
                texts[path] = path.read_bytes()
    assert any(path.name == "prefect.db" for path in texts)
    assert not [path for path, text in texts.items() for secret in secrets if secret.encode() in text]


def check_registry(client: MlflowClient) -> None:
    """Version 1 was better than the base, versions 2 and 3 are worse than version 1; 2 is as good as the base."""
    assert client.get_model_version_by_alias("tiny", CHAMPION).version == "1"
    versions = {v.version: v.tags for v in client.search_model_versions("name = 'tiny'")}
    assert [REGRESSION in versions[number] for number in "123"] == [False, True, True]
    experiment = client.get_experiment_by_name("doubleflow")
    found = client.search_runs([experiment.experiment_id], "tags.`doubleflow.subject` LIKE '%'")
    measured = {run.data.tags["doubleflow.subject"]: run for run in found}
    assert measured.keys() == {"base", "tiny/1", "tiny/2", "tiny/3"}
    assert measured["tiny/1"].data.metrics["gain/base/low"] > 0
    assert measured["tiny/2"].data.metrics["gain/base/mean"] == 0  # the same weights and noise: not a bit of difference
    assert measured["tiny/3"].data.metrics["gain/base/low"] > 0 > measured["tiny/3"].data.metrics["gain/best/high"]
    (parent,) = {run.data.tags["mlflow.parentRunId"] for run in found}
    assert REGRESSION in client.get_run(versions_run(client)).data.tags
    pictures = [item.path for item in client.list_artifacts(measured["tiny/1"].info.run_id, "images")]
    assert len([path for path in pictures if path.endswith(".png")]) == 2  # a grid for each seed
    assert client.get_run(parent).info.run_name == "validation-sweep-tiny"


def versions_run(client: MlflowClient) -> str:
    return client.get_model_version("tiny", "2").run_id


def logs(api: str, flow_run: dict, auth: tuple[str, str]) -> str:
    """What the server has been sent of a flow run's logs by now."""
    of_run = {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}}
    return "\n".join(log["message"] for log in post(f"{api}/logs/filter", of_run, auth))


def runs(api: str, flow: str, state: str, auth: tuple[str, str]) -> list:
    body = {"flows": {"name": {"any_": [flow]}}, "flow_runs": {"state": {"type": {"any_": [state]}}}}
    return post(f"{api}/flow_runs/filter", body, auth)
