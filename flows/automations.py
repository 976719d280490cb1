"""What Prefect's server does by itself: `python -m flows.automations`, which `make up` calls, brings it up to date."""

from prefect.automations import Automation, EventTrigger
from prefect.client.orchestration import get_client
from prefect.events.actions import RunDeployment

from flows.validation_sweep import REGRESSION

COMPARE_REGRESSION = "compare-a-regression"


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


if __name__ == "__main__":
    update_automations()
