# SPDX-License-Identifier: Apache-2.0
"""Prefect's command line, `python -m flows.deploy.prefect_command server start`, whose server keeps answering.

With SQLite Prefect before 3.8.8 waits, once an automation was changed, in the very event loop whose other coroutines
hold the lock that it waits for: then the server never answers again (PrefectHQ/prefect#23055). A newer one wants
FastAPI 0.139, and vLLM one before 0.137.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from prefect.server.events.models import automations
from prefect.utilities.asyncutils import create_task, run_coro_as_sync


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
    automations.run_coro_as_sync = run_beside  # type: ignore[assignment]


if __name__ == "__main__":
    from prefect.cli import app

    keep_loop_free()
    app()
