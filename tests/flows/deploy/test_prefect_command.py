# SPDX-License-Identifier: Apache-2.0
"""Prefect's server answers whatever holds the lock of its automations."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE
from tests.support.prefect_store import prefect_in

CHANGES_ONE = """
import asyncio
from prefect.server.database import provide_database_interface
from prefect.server.events import triggers
from prefect.server.events.actions import DoNothing
from prefect.server.events.models.automations import create_automation
from prefect.server.events.schemas.automations import Automation, EventTrigger, Posture

from flows.deploy.prefect_command import keep_loop_free

keep_loop_free()


async def hold(held, answered):
    async with triggers._automations_lock():
        held.set()
        await answered.wait()


async def main():
    held, answered = asyncio.Event(), asyncio.Event()
    holder = asyncio.create_task(hold(held, answered))
    await held.wait()
    trigger = EventTrigger(expect={"a"}, posture=Posture.Reactive, threshold=1)
    async with provide_database_interface().session_context(begin_transaction=True) as session:
        made = await create_automation(session, Automation(name="one", trigger=trigger, actions=[DoNothing()]))
    print("answered", list(triggers.automations_by_id), flush=True)
    answered.set()
    await holder
    while made.id not in triggers.automations_by_id:
        await asyncio.sleep(0.01)
    print("known")


asyncio.run(main())
"""
"""Creates an automation, as the server does for a request, while another coroutine holds the lock until the answer."""


def test_a_change_of_an_automation_does_not_wait_for_who_holds_their_lock(tmp_path: Path) -> None:
    environment = os.environ | prefect_in(tmp_path) | {"PREFECT_API_URL": "", "PREFECT_SERVER_ANALYTICS_ENABLED": "0"}
    command = [sys.executable, "-c", CHANGES_ONE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.split("\n") == ["answered []", "known", ""], done.stderr
