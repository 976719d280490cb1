"""Hosts one reward over HTTP, for runs on other machines: `python -m tasks.rewards.serve --reward ocr --port 8100`.

The protocol is in docs/rewards.md. There is no authentication: serve a network that is trusted, or put a proxy before
it. Nothing that arrives is ever unpickled.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
import uvicorn
import yaml
from fastapi import FastAPI, File, Request, UploadFile
from fastapi.responses import JSONResponse

from tasks.rewards.base import Reward, RewardError, RewardResult, get_reward
from tasks.rewards.remote import PROTOCOL, check_protocol, unpack_batch


@dataclass(frozen=True)
class SentPrompt:
    """A prompt as the client sent it."""

    prompt: str
    target: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def make_app(reward: Reward) -> FastAPI:
    """The server of one reward. Batches are scored one at a time, in one thread: rewards need not be thread-safe."""
    app = FastAPI(title=f"Reward {reward.name}", version=str(PROTOCOL))
    thread = ThreadPoolExecutor(1)

    @app.get("/v1/reward")
    def hosted() -> dict[str, Any]:
        """What is hosted here."""
        return {"protocol": PROTOCOL, "name": reward.name, "version": reward.version, "wants": reward.wants}

    @app.post("/v1/score")
    async def score(
        request: Annotated[UploadFile, File()],
        tensor: Annotated[UploadFile | None, File()] = None,
        images: Annotated[list[UploadFile] | None, File()] = None,
    ) -> dict[str, Any]:
        """Score one batch."""
        prompts = _prompts(await request.read())
        batch = unpack_batch(await tensor.read() if tensor else None, [await image.read() for image in images or []])
        result = await asyncio.get_running_loop().run_in_executor(thread, reward, batch, prompts)
        return {"protocol": PROTOCOL, "version": reward.version} | _as_json(result)

    @app.exception_handler(RewardError)
    def misuse(_: Request, error: RewardError) -> JSONResponse:
        return JSONResponse({"protocol": PROTOCOL, "error": str(error)}, status_code=400)

    @app.exception_handler(Exception)
    def failure(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"protocol": PROTOCOL, "error": f"{type(error).__name__}: {error}"}, status_code=500)

    return app


def _prompts(content: bytes) -> list[SentPrompt]:
    try:
        body = json.loads(content)
        check_protocol(body.get("protocol"), "the client", "this server")
        return [SentPrompt(**row) for row in body["prompts"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, RewardError):
            raise
        raise RewardError(f"the part `request` is not as the protocol says: {error!r}") from error


def _as_json(result: RewardResult) -> dict[str, Any]:
    details = {name: [_plain(value) for value in values] for name, values in result.details.items()}
    return {"scores": [_plain(score) for score in result.scores], "details": details}


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's, NaN as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value


def main(
    reward: Annotated[str, typer.Option(help="Registered name or package.module:object.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    option: Annotated[list[str] | None, typer.Option(help="name=value of the reward, YAML; may be repeated.")] = None,
) -> None:
    """Load a reward and serve it until the process is ended."""
    pairs = [text.partition("=") for text in option or []]
    for name, equals, _ in pairs:
        if not equals:
            raise typer.BadParameter(f"{name!r} must have the form name=value", param_hint="--option")
    loaded = get_reward(reward, **{name: yaml.safe_load(value) for name, _, value in pairs})
    config = uvicorn.Config(make_app(loaded), host=host, port=port, log_level="warning")
    listening = config.bind_socket()
    address = f"http://{host}:{listening.getsockname()[1]}"
    typer.echo(f"{loaded.name} ({loaded.version}) is served at {address}")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    typer.run(main)
