# SPDX-License-Identifier: Apache-2.0
"""Prefect's command line, `python -m flows.deploy.deploy_command deploy --all`, which takes half of the time.

`deploy` describes the parameters of a deployment's flow several times over, and most deployments here are of one flow,
whose parameters are the whole tree of settings. What is mended for the server (`prefect_command`) is seconds of imports
for which it has no use.
"""

from inspect import Signature

from prefect.utilities import callables
from prefect.utilities.callables import ParameterSchema


def describe_once() -> None:
    """From now on this process describes equal parameters once, however often a flow's script is loaded.

    Equal are those whose signatures and docstrings read the same, types with their modules.
    """
    describe, known = callables.generate_parameter_schema, dict[str, ParameterSchema]()

    def remembered(signature: Signature, docstrings: dict[str, str]) -> ParameterSchema:
        words = f"{signature} {docstrings}"
        if words not in known:
            known[words] = describe(signature, docstrings)
        return known[words].model_copy(deep=True)

    callables.generate_parameter_schema = remembered


if __name__ == "__main__":
    from prefect.cli import app

    describe_once()
    app()
