# SPDX-License-Identifier: Apache-2.0
"""The end of a flow run whose work is done and recorded: no signal makes Prefect say anything else of it."""

import threading
from contextvars import copy_context
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.states import Completed

from tasks.system.signals import LastWait, unheeded_while

PREFECT_SECONDS = 10.0
"""For Prefect to be told, by a process that is to end at once."""
LAST_WORDS = "all is done and recorded; Ray still ends, and Prefect hears of it: the same again leaves at once"


def heed_no_signal() -> None:
    """Until Prefect has the end of this flow run, SIGTERM and Ctrl-C change nothing of what it hears.

    A command tells a first one that the end is waited for, which Ray may never let come, as where a machine of its
    cluster does not answer. At the next one Prefect hears that the flow run is Completed, and the process ends.
    """
    own = FlowRunContext.get()
    if own is not None:
        unheeded_while(lambda: FlowRunContext.get() is own)
        _answer(own.flow_run)


def _answer(flow_run: FlowRun | None) -> None:
    """From now on signals are."""
    if flow_run is not None:
        # With Prefect's settings, which a thread of its own would not have.
        telling = threading.Thread(target=copy_context().run, args=(_complete, flow_run.id), daemon=True)

        def tell() -> None:
            telling.start()
            telling.join(PREFECT_SECONDS)

        LastWait(lambda: flow_run.state is not None and flow_run.state.is_final(), LAST_WORDS, tell).begin()


def _complete(flow_run_id: UUID) -> None:
    """Prefect hears that it is."""
    message = "all was done and recorded; a signal ended the process while Ray was ending"
    completed: State[Any] = Completed(message=message)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, completed, force=True)
