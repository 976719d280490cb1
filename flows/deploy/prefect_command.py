# SPDX-License-Identifier: Apache-2.0
"""Prefect's command line, `python -m flows.deploy.prefect_command`: a server that keeps answering, a faster `deploy`.

With SQLite Prefect before 3.8.8 waits, once an automation was changed, in the very event loop whose other coroutines
hold the lock that it waits for: then the server never answers again (PrefectHQ/prefect#23055). A newer one wants
FastAPI 0.139, and vLLM one before 0.137.

`deploy` describes the parameters of a deployment's flow several times over, and most deployments here are of one flow,
whose parameters are the whole tree of settings: four fifths of the command's time.
"""

import asyncio
from collections.abc import Coroutine
from inspect import Signature
from typing import Any

from prefect.utilities import callables
from prefect.utilities.asyncutils import create_task, run_coro_as_sync
from prefect.utilities.callables import ParameterSchema


def run_beside(coroutine: Coroutine[Any, Any, None]) -> None:
    """Have it run in the event loop of this thread, after this returns; where there is none, wait for its end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run_coro_as_sync(coroutine)
    else:
        create_task(coroutine)


def keep_loop_free() -> None:
    """From now on the server of this process brings its cache of automations up to date beside its other work."""
    from prefect.server.events.models import automations  # here: seconds, which `deploy` has no use for

    automations.run_coro_as_sync = run_beside  # type: ignore[assignment]


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
    import sys

    from prefect.cli import app

    if "server" in sys.argv:
        keep_loop_free()
    else:
        describe_once()
    app()
