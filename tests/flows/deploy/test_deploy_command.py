# SPDX-License-Identifier: Apache-2.0
"""`deploy` describes a flow once, and as Prefect does."""

from collections.abc import Callable
from inspect import Signature

import pytest
from prefect.utilities import callables
from prefect.utilities.callables import ParameterSchema

from flows.deploy.deploy_command import describe_once


def flow(first: int = 1) -> Callable[..., None]:
    """A new function at each call, as the flow of a script that is loaded anew."""

    def train(prompts: int = first, scale: float = 0.5) -> None:
        """Train.

        Args:
            prompts: of an iteration.
        """

    return train


def test_equal_parameters_are_described_once_and_others_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, described = callables.generate_parameter_schema, list[str]()

    def counted(signature: Signature, docstrings: dict[str, str]) -> ParameterSchema:
        described.append(str(signature))
        return whole(signature, docstrings)

    monkeypatch.setattr(callables, "generate_parameter_schema", counted)  # and put back: what follows replaces it
    expected, other = callables.parameter_schema(flow()), callables.parameter_schema(flow(2))
    described.clear()
    describe_once()
    found = callables.parameter_schema(flow())
    assert found == expected
    found.properties.clear()  # whoever has it may change it
    assert callables.parameter_schema(flow()) == expected
    assert callables.parameter_schema(flow(2)) == other != expected
    assert described == [
        "(prompts: int = 1, scale: float = 0.5) -> None",
        "(prompts: int = 2, scale: float = 0.5) -> None",
    ]
