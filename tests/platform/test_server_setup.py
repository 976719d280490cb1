# SPDX-License-Identifier: Apache-2.0
"""What `up` sets up on a real Prefect server, where the answers to its requests are lost: each thing is there once."""

import re
from collections.abc import Iterator

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deploy.prefect_server import (
    CLOSE_CRASHED,
    COMPARE_REGRESSION,
    CRASH_THE_SILENT,
    set_up_pool,
    update_automations,
)
from tests.support.lost_answers import lost_answers

POOL, LIMIT = "lossy", "lossy-gpus"
NAMES = (COMPARE_REGRESSION, CRASH_THE_SILENT, CLOSE_CRASHED)
MAKES_LIMIT = re.compile(rb"POST \S*/v2/concurrency_limits/ ")
MAKES_AUTOMATION = re.compile(rb"POST \S*/automations/ ")
REMOVES_AUTOMATION = re.compile(rb"DELETE \S*/automations/\S+ ")


@pytest.fixture
def server(prefect_server: dict[str, str]) -> Iterator[httpx.URL]:
    """Its address; it has the two deployments that automations start. What was set up is removed afterwards."""
    with (
        temporary_settings({PREFECT_API_URL: prefect_server["PREFECT_API_URL"]}),
        get_client(sync_client=True) as client,
    ):
        made = []
        for name in ("compare", "close-dead-runs"):
            flow = client.create_flow_from_name(name)
            made.append(client.create_deployment(flow, name, entrypoint="flows.py:flow"))
        yield httpx.URL(prefect_server["PREFECT_API_URL"])
        for automation in client.read_automations():
            client.delete_automation(automation.id)
        for deployment in made:
            client.delete_deployment(deployment)
        client.delete_work_pool(POOL)
        client.delete_global_concurrency_limit_by_name(LIMIT)


def set_up(server: httpx.URL, loses: re.Pattern[bytes]) -> dict[str, int]:
    """Name of an automation -> how many are there then."""
    with (
        lost_answers(server.host, server.port or 80, loses) as lossy,
        temporary_settings({PREFECT_API_URL: f"{lossy.address}/api"}),
    ):
        set_up_pool(POOL, 1, LIMIT, 2)
        update_automations()
    assert len(lossy.lost) == 1
    with get_client(sync_client=True) as client:
        return {name: len(client.read_automations_by_name(name)) for name in NAMES}


def test_what_up_sets_up_is_there_once(server: httpx.URL) -> None:
    """Two automations of a name would compare each regression twice."""
    once = dict.fromkeys(NAMES, 1)
    assert set_up(server, MAKES_AUTOMATION) == once
    with get_client(sync_client=True) as client:
        client.delete_global_concurrency_limit_by_name(LIMIT)
        assert set_up(server, MAKES_LIMIT) == once
        assert client.read_global_concurrency_limit_by_name(LIMIT).limit == 2
        (another,) = client.read_automations_by_name(CLOSE_CRASHED)
        client.pause_automation(another.id)  # is another one than `up` wants
    assert set_up(server, REMOVES_AUTOMATION) == once
