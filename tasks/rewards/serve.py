# SPDX-License-Identifier: Apache-2.0
"""Hosts one reward over HTTP, for runs on other machines: `python -m tasks.rewards.serve --reward ocr --port 8100`.

The protocol is in docs/rewards.md. There is no authentication: serve a network that is trusted, or put a proxy before
it. Nothing that arrives is ever unpickled.
"""

import asyncio
import hashlib
import json
import math
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO

import typer
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from models.errors import DoubleflowError
from tasks.config.errors import ConfigError
from tasks.config.named_values import named_values
from tasks.rewards.base import Reward, RewardResult, get_reward
from tasks.rewards.errors import RewardError
from tasks.rewards.remote import (
    MAX_PICTURES,
    MAX_PIXELS,
    MAX_REQUEST_MB,
    PROTOCOL,
    TooLarge,
    check_protocol,
    unpack_batch,
)

CLIENT_GONE = 499
"""Nobody reads this status; proxies' logs have it for such a request."""


@dataclass(frozen=True)
class SentPrompt:
    """A prompt as the client sent it."""

    prompt: str
    target: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise TypeError for what JSON can hold and a prompt cannot."""
        if not (isinstance(self.prompt, str) and isinstance(self.target, str | None)):
            raise TypeError("a prompt must be text, and its target text or null")
        if not isinstance(self.metadata, dict):
            raise TypeError("a prompt's metadata must be an object")


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        max_pixels: of one PNG.
        max_request_mb: of one request, and of its PNGs when they are unpacked; 10^6 bytes each.
        max_pictures: PNGs of one request.
    """

    max_pixels: int = MAX_PIXELS
    max_request_mb: float = MAX_REQUEST_MB
    max_pictures: int = MAX_PICTURES


def make_app(reward: Reward, limits: Limits = Limits(), version: str | None = None) -> FastAPI:
    """The server of one reward. Batches are read and scored one at a time, in one thread: rewards need not be
    thread-safe, and whoever waits has its pictures on the disk.

    Args:
        version: that is told; None tells the reward's own.
    """
    app = FastAPI(title=f"Reward {reward.name}", version=str(PROTOCOL))
    thread, turn = ThreadPoolExecutor(1), asyncio.Lock()
    told = reward.version if version is None else version

    @app.get("/v1/reward")
    def hosted() -> dict[str, Any]:
        """What is hosted here."""
        taken = {"max_request_mb": limits.max_request_mb, "max_pictures": limits.max_pictures}
        return {"protocol": PROTOCOL, "name": reward.name, "version": told, "wants": reward.wants, "limits": taken}

    def scored(request: bytes | BinaryIO, tensor: BinaryIO | None, images: list[BinaryIO]) -> RewardResult:
        prompts = _prompts(request if isinstance(request, bytes) else request.read())
        content = tensor.read() if tensor else None, [image.read() for image in images]
        return reward(unpack_batch(*content, limits.max_pixels, limits.max_request_mb), prompts)

    async def scored_in_turn(request: Request, *parts: Any) -> RewardResult:
        async with turn:
            if await request.is_disconnected():
                raise HTTPException(CLIENT_GONE, "the client had gone when its batch's turn came")
            return await asyncio.get_running_loop().run_in_executor(thread, scored, *parts)

    @app.post("/v1/score")
    async def score(request: Request) -> dict[str, Any]:
        """Score one batch: a form with the parts `request` and either `tensor` or `images`."""
        capped = Request(request.scope, _capped(request.receive, int(limits.max_request_mb * 1e6)))
        async with capped.form(max_files=limits.max_pictures + 2, max_fields=8) as form:
            result = await scored_in_turn(request, *_parts(form, limits.max_pictures))
        return {"protocol": PROTOCOL, "version": told} | _as_json(result)

    @app.exception_handler(TooLarge)
    def too_large(_: Request, error: TooLarge) -> JSONResponse:
        return JSONResponse({"protocol": PROTOCOL, "error": str(error)}, status_code=413)

    @app.exception_handler(HTTPException)
    def refused(_: Request, error: HTTPException) -> JSONResponse:
        # Of the form's parser, whose words name no option of this server.
        too_many = error.status_code == 400 and str(error.detail).startswith("Too many files")
        reason = _too_many(f"more than {limits.max_pictures + 2}", limits.max_pictures) if too_many else error.detail
        return JSONResponse({"protocol": PROTOCOL, "error": str(reason)}, status_code=error.status_code)

    @app.exception_handler(RewardError)
    def misuse(_: Request, error: RewardError) -> JSONResponse:
        return JSONResponse({"protocol": PROTOCOL, "error": str(error)}, status_code=400)

    @app.exception_handler(Exception)
    def failure(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"protocol": PROTOCOL, "error": f"{type(error).__name__}: {error}"}, status_code=500)

    return app


def _capped(receive: Receive, max_bytes: int) -> Receive:
    """`receive`, which raises TooLarge for a body of more bytes.

    As many bytes again are read and dropped before it does: a client that still sends would see a lost connection in
    place of the answer.
    """
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen <= max_bytes:
            return message
        while message.get("more_body") and seen <= 2 * max_bytes:
            message = await receive()
            seen += len(message.get("body", b""))
        raise TooLarge(
            f"the request is larger than {max_bytes / 1e6:g} MB, which is all that is taken: send fewer samples "
            "at once, or start the server with a larger --max-request-mb"
        )

    return counted


def _parts(form: FormData, max_pictures: int) -> tuple[bytes | BinaryIO, BinaryIO | None, list[BinaryIO]]:
    """The parts `request`, `tensor` and `images` of a request, not yet read."""
    request, tensor, images = form.get("request"), form.get("tensor"), form.getlist("images")
    if request is None:
        raise RewardError("the form has no part `request`")
    for name in ("request", "tensor"):
        if len(form.getlist(name)) > 1:
            raise RewardError(f"the form has {len(form.getlist(name))} parts `{name}`; give one")
    if len(images) > max_pictures:
        raise RewardError(_too_many(str(len(images)), max_pictures))
    files = [part.file for part in (*images, tensor) if isinstance(part, UploadFile)]
    if len(files) != len(images) + (tensor is not None):
        raise RewardError("the parts `tensor` and `images` must be files: give each a file name")
    content = request.file if isinstance(request, UploadFile) else request.encode()
    return content, files[len(images)] if tensor is not None else None, files[: len(images)]


def _too_many(count: str, max_pictures: int) -> str:
    return (
        f"the form has {count} parts `images`, and at most {max_pictures} are taken: send fewer at once, or start the "
        "server with a larger --max-pictures"
    )


def _prompts(content: bytes) -> list[SentPrompt]:
    try:
        body = json.loads(content)
        check_protocol(body.get("protocol"), "the client", "this server")
        return [SentPrompt(**row) for row in body["prompts"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, RewardError):
            raise
        raise RewardError(f"the part `request` is not as the protocol says: {error!r}") from error


def _as_json(result: RewardResult) -> dict[str, Any]:
    details = {name: [_plain(value) for value in values] for name, values in result.details.items()}
    scores = [_plain(score) for score in result.scores.tolist()]
    return {"scores": scores, "details": details} | ({"raised": result.raised} if result.raised else {})


def _plain(value: Any) -> Any:
    """None for what JSON has no number for; a video's details are lists of its frames'."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def version_with(version: str, options: Mapping[str, Any]) -> str:
    """A reward's version together with a digest of the options that it was loaded with, where there are any: they may
    change its scores, and a client cannot see them otherwise."""
    if not options:
        return version
    canonical = json.dumps(_sorted(options), default=repr)
    return f"{version} options={hashlib.sha256(canonical.encode()).hexdigest()[:12]}"


def _sorted(value: Any) -> Any:
    """A value of YAML with the keys of its mappings as text, in order."""
    if isinstance(value, Mapping):
        return {str(key): _sorted(value[key]) for key in sorted(value, key=str)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def main(
    reward: Annotated[str, typer.Option(help="Registered name or package.module:object.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    option: Annotated[list[str] | None, typer.Option(help="name=value of the reward, YAML; may be repeated.")] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Of one PNG.")] = MAX_PIXELS,
    max_request_mb: Annotated[
        float, typer.Option(min=0.001, help="Of one request, and of its PNGs when they are unpacked.")
    ] = MAX_REQUEST_MB,
    max_pictures: Annotated[int, typer.Option(min=1, help="PNGs of one request.")] = MAX_PICTURES,
) -> None:
    """Load a reward and serve it until the process is ended."""
    try:
        options = named_values(option or [])
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--option") from error
    try:
        listening = _listening(host, port)
        loaded = get_reward(reward, **options)
    except DoubleflowError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    version = version_with(loaded.version, options)
    app = make_app(loaded, Limits(max_pixels, max_request_mb, max_pictures), version)
    address = f"http://{host}:{listening.getsockname()[1]}"
    listening.listen()  # who reads the next line may connect at once, and waits for uvicorn
    typer.echo(f"{loaded.name} ({version}) is served at {address}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise ConfigError(
            f"--host {host} and --port {port} cannot be served ({error.strerror}): give others"
        ) from error


def listening_socket(host: str, port: int) -> socket.socket:
    """At this address, where it does not listen yet; answers leave it at once.

    asyncio sees to that for sockets whose protocol is TCP by name, which that of uvicorn's is not: the end of each
    answer would wait for the client's acknowledgement of its beginning, 40 ms where a client keeps its connection.

    Raises:
        OSError: the port is taken, or the address not this machine's.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.bind((host, port))
    return listening


if __name__ == "__main__":
    typer.run(main)
