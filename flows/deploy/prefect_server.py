# SPDX-License-Identifier: Apache-2.0
"""What Prefect's server must know beside the deployments: the work pool, the GPU limit, and what to react to."""

from prefect.automations import Automation, EventTrigger
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.actions import RunDeployment
from prefect.workers.process import ProcessWorker

from tasks.records.model_registry import REGRESSION

COMPARE_REGRESSION = "compare-a-regression"


def set_up_pool(pool: str, runs: int, gpu_limit: str, gpus: int) -> None:
    """A pool of process workers for `runs` flow runs at a time, and a global concurrency limit of `gpus` slots."""
    with get_client(sync_client=True) as client:
        template = ProcessWorker.get_default_base_job_template()
        wanted = WorkPoolCreate(name=pool, type="process", base_job_template=template, concurrency_limit=runs)
        client.create_work_pool(wanted, overwrite=True)
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


def update_automations() -> None:
    """Create the automations, in place of older ones of the same name."""
    automation = regression_automation()
    with get_client(sync_client=True) as client:
        for old in client.read_automations_by_name(automation.name):
            client.delete_automation(old.id)
    automation.create()
