"""Every deployment of prefect.yaml is one that its flow would accept."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.callables import parameter_schema

from flows.recipes import load_recipe
from flows.sweep_config import SweepConfig

ROOT = Path(__file__).parent.parent
DEPLOYMENTS = {d["name"]: d for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
NEEDS_MORE = {"reproduce": {"run": "0"}, "compare": {"run": "0", "against": "1"}}


def flow_of(deployment: dict[str, Any]) -> Any:
    file, name = deployment["entrypoint"].split(":")
    return getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_flow_accepts_the_deployments_parameters(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    flow_of(deployment).validate_parameters(deployment.get("parameters", {}) | NEEDS_MORE.get(name, {}))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_parameter_is_described(name: str) -> None:
    """What Prefect's form shows."""
    schema = parameter_schema(flow_of(DEPLOYMENTS[name]).fn).model_dump_for_openapi()
    fields = dict(schema["properties"])
    for section, definition in schema.get("definitions", {}).items():
        fields |= {f"{section}.{field}": entry for field, entry in definition.get("properties", {}).items()}
    assert [field for field, entry in fields.items() if not entry.get("description")] == []


def test_a_sweeps_dimensions_are_fields_of_its_config() -> None:
    search = SweepConfig.model_validate(DEPLOYMENTS["sweep"]["parameters"]["search"])
    parameters = load_recipe("quickstart", ROOT / "prefect.yaml").model_dump()
    for path in search.space:
        node: Any = parameters
        for part in path.split("."):
            node = node[part]
