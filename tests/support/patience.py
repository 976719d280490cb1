# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

PATIENCE = 900
"""Seconds after which something that should have happened is taken to hang: many times what it takes on a slow machine,
for a test that gives up early on a busy one tells nothing."""


def wait_until(condition: Callable[[], Any], what: str, every: float = 0.5) -> Any:
    """Poll until `condition` gives something true; fails after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(every)
    pytest.fail(f"{what} did not happen within {PATIENCE} s")


def wait_for_server(address: str, what: str) -> None:
    """Until the address answers 200."""

    def answers() -> bool:
        try:
            return httpx.get(address, timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, what)


def get(address: str) -> Any:
    """What a Prefect server holds there."""
    return ask("GET", address)


def post(address: str, body: dict | list, auth: tuple[str, str] | None = None) -> Any:
    """What a Prefect server answers to a body; None where it has nothing to say."""
    return ask("POST", address, json=body, auth=auth)


def ask(method: str, address: str, **request: Any) -> Any:
    """As Prefect's own clients do it: a server that is busy says 503, or nothing for a while, and is asked again."""

    def answer() -> httpx.Response | None:
        try:
            response = httpx.request(method, address, timeout=120, **request)
        except httpx.TransportError:
            return None
        return None if response.status_code == 503 else response

    response = wait_until(answer, f"an answer from {address}")
    assert response.is_success, response.text
    return response.json() if response.content else None
