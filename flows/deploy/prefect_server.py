# SPDX-License-Identifier: Apache-2.0
"""What Prefect's server must know beside the deployments: the work pool, the GPU limit, and what to react to.

Also what it is told before it is shut down: that the flow runs of its pool have ended.
"""

from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any

from httpx import HTTPStatusError, codes
from prefect.automations import Automation, EventTrigger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType, WorkerStatus
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import Automation as StoredAutomation
from prefect.events.schemas.automations import AutomationCore, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists
from prefect.states import Crashed
from prefect.workers.process import ProcessWorker

from tasks.records.model_registry import REGRESSION
from tasks.system.heartbeats import HEARTBEATS, SILENT_SECONDS

COMPARE_REGRESSION = "compare-a-regression"
CRASH_THE_SILENT = "crash-a-run-without-heartbeats"
CLOSE_CRASHED = "close-a-crashed-run"
HEARTBEAT = "prefect.flow-run.heartbeat"
TRACKED_FLOWS = ["train", "validate", "sweep", "validation-sweep", "reproduce"]
"""Those that have MLflow runs."""
UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
"""States that take a slot of the work pool."""


def set_up_pool(pool: str, runs: int, gpu_limit: str, gpus: int) -> None:
    """A pool of process workers for `runs` flow runs at a time, and a global concurrency limit of `gpus` slots."""
    with get_client(sync_client=True) as client:
        template = ProcessWorker.get_default_base_job_template()
        template["variables"]["properties"]["env"]["default"] = HEARTBEATS  # for workers of other machines, too
        wanted = WorkPoolCreate(name=pool, type="process", base_job_template=template, concurrency_limit=runs)
        client.create_work_pool(wanted, overwrite=True)
        try:
            client.upsert_global_concurrency_limit_by_name(gpu_limit, gpus)
        except ObjectAlreadyExists:  # made by this request, which Prefect's client repeats where the answer is lost
            client.upsert_global_concurrency_limit_by_name(gpu_limit, gpus)


def regression_automation() -> Automation:
    """When a validation sweep finds a regression, compare the two measurements: a page for whoever looks into it."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("compare/compare")
    parameters = {
        name: {"__prefect_kind": "jinja", "template": f"{{{{ event.payload['{key}'] }}}}"}
        for name, key in (("run", "run"), ("against", "against"))
    }
    return Automation(
        name=COMPARE_REGRESSION,
        description="Compares weights that a validation sweep found worse with those they are worse than.",
        trigger=EventTrigger(expect={REGRESSION}, posture="Reactive", threshold=1),
        actions=[RunDeployment(source="selected", deployment_id=deployment.id, parameters=parameters)],
    )


def silence_automation() -> Automation:
    """A flow run whose heartbeats stop is Crashed: its process was killed, or its machine vanished."""
    return Automation(
        name=CRASH_THE_SILENT,
        description=f"Sets a flow run Crashed that has sent no heartbeat for {SILENT_SECONDS} seconds.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={"prefect.flow-run.*"},  # the next one, or any state: some have names of their own
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENT_SECONDS),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"no heartbeat for {SILENT_SECONDS} s: its process was killed, or its machine is gone. "
                "Started again, a training run continues from its newest checkpoint.",
            )
        ],
    )


def crash_automation() -> Automation:
    """MLflow hears of a crashed flow run from a run of `close-dead-runs`."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("close-dead-runs/close-dead-runs")
    flows = {"prefect.resource.role": "flow", "prefect.resource.name": TRACKED_FLOWS}
    return Automation(
        name=CLOSE_CRASHED,
        description="Sets the MLflow runs of a crashed flow run FAILED.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Crashed"},
            match_related=ResourceSpecification(flows),
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment.id,
                parameters={"flow_run": {"__prefect_kind": "jinja", "template": "{{ flow_run.id }}"}},
            )
        ],
    )


def update_automations() -> None:
    """Create the automations, in place of others of the same name; those that are there as they are now stay."""
    for automation in (regression_automation(), silence_automation(), crash_automation()):
        with get_client(sync_client=True) as client:
            there = client.read_automations_by_name(automation.name)
            if [_content(old) for old in there] == [_content(automation)]:
                continue
            _delete(client, there)
            automation.create()
            # Where the answer to that was lost, Prefect's client has asked again: two would start two flow runs each.
            _delete(client, client.read_automations_by_name(automation.name)[1:])


def _delete(client: SyncPrefectClient, automations: Iterable[StoredAutomation]) -> None:
    """Remove these, also where the answer is lost: asked again, the server says that there is no such automation."""
    for automation in automations:
        try:
            client.delete_automation(automation.id)
        except HTTPStatusError as error:
            if error.response.status_code != codes.NOT_FOUND:
                raise


def _content(automation: AutomationCore) -> dict[str, Any]:
    """What it does; not the id and the owner, which the server adds."""
    return automation.model_dump(mode="json", include=set(AutomationCore.model_fields) - {"owner_resource"})


def pause_pool(pool: str) -> None:
    """Its workers start no flow run any more, until `set_up_pool`."""
    with get_client(sync_client=True) as client:
        client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))


def end_flow_runs(pool: str, worker: str, ended: Collection[str], message: str) -> list[str]:
    """Set Crashed what a worker has left unfinished of a pool's flow runs. The names of these runs.

    Args:
        pool: the work pool.
        worker: name of the worker, which is about to end.
        ended: ids of flow runs whose process has ended. Where no other worker serves the pool, the rest of its
            unfinished runs go too: those of workers that died earlier, and those that have no process yet.
        message: why, for the runs' pages.
    """
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED))
    name = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool]))
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state), work_pool_filter=name)
        workers = client.read_workers_for_work_pool(pool)
        shared = any(other.name != worker and other.status == WorkerStatus.ONLINE for other in workers)
        found = [run for run in found if not shared or str(run.id) in ended]
        for run in found:
            client.set_flow_run_state(run.id, Crashed(message=message), force=True)
    return [run.name for run in found]
