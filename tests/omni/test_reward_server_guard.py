# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server of a reward model: behind the guard no path answers without the run's secret."""

import asyncio
from argparse import Namespace

import httpx
import pytest
from fastapi import FastAPI

from tasks.actors.reward_model_server import GUARD
from tasks.rewards import served

KEY = {"Authorization": "Bearer of-the-run"}


def test_no_path_of_vllm_answers_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own API key leaves paths open that have a process's methods called, where the model is to sleep."""
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.entrypoints.serve.dev.rpc.api_router import attach_router
    from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

    monkeypatch.setenv(served.KEY, "of-the-run")
    monkeypatch.setenv("VLLM_API_KEY", "of-the-run")
    monkeypatch.syspath_prepend(GUARD.parent)

    def answers(path: str, middleware: list[str], headers: dict[str, str]) -> int:
        app = FastAPI()
        attach_router(app)
        settings = Namespace(**vars(FrontendArgs()) | {"middleware": middleware})
        init_entrypoints_middleware(settings, app, ())

        async def ask() -> int:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
                return (await client.post(path, content="{}", headers=headers)).status_code

        return asyncio.run(ask())

    guarded = [f"{GUARD.stem}.Guard"]
    assert answers("/collective_rpc", [], {}) == 400, "vLLM alone reads what anybody sends"
    assert answers("/collective_rpc", guarded, {}) == 401
    assert answers("/collective_rpc", guarded, {"Authorization": "Bearer other"}) == 401
    assert answers("/collective_rpc", guarded, KEY) == 400
    assert answers("/v1/models", guarded, {}) == 401
