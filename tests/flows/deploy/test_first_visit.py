# SPDX-License-Identifier: Apache-2.0
"""MLflow's page as `make up`'s server sends it: with answers for a browser that remembers nothing.

What the answers do is seen in a browser, in tests/pages.
"""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from flows.deploy.asgi import Application
from flows.deploy.first_visit import remembered, script, with_first_visit


def page_in_parts(seen: list[dict[bytes, bytes]]) -> Application:
    """A server whose page comes in two parts that cut its head."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]))
        parts = [b"<!doctype html><he", b"ad><title>MLflow</title></head>"]
        headers = [(b"content-type", b"text/html"), (b"content-length", str(sum(map(len, parts))).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": part is parts[0]})

    return app


def asked(path: str) -> tuple[httpx.Response, dict[bytes, bytes]]:
    """The answer to a browser that has a copy of the page, and the headers that the server saw."""
    seen: list[dict[bytes, bytes]] = []

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(with_first_visit(page_in_parts(seen)))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(path, headers={"if-none-match": "x"})

    return asyncio.run(ask()), seen[0]


def test_the_page_begins_with_the_script_and_is_never_an_older_copy() -> None:
    answer, seen = asked("/")
    assert answer.text == f"<!doctype html><head>{script()}<title>MLflow</title></head>"
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert b"if-none-match" not in seen


def test_everything_else_is_sent_as_it_is() -> None:
    answer, seen = asked("/ajax-api/2.0/mlflow/runs/search")
    assert "<script>" not in answer.text
    assert seen[b"if-none-match"] == b"x"


@pytest.mark.parametrize(
    "key",
    [
        "mlflow.workflowType_v1",
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1",
        'MLflowLocalStorage-1.1-ExperimentPage-["1"]-ReactComponentState',
        f"MLflowLocalStorage-1.1-RunPage-{32 * 'a'}-model-chartUIState",
    ],
)
def test_there_is_one_answer_for_each_of_mlflows_keys(key: str) -> None:
    assert len([pattern for pattern in remembered() if re.search(pattern, key)]) == 1
    assert json.dumps(remembered())
