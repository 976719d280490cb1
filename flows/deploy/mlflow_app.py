# SPDX-License-Identifier: Apache-2.0
"""MLflow's server behind a password: `mlflow server --app-name doubleflow` (an entry point of pyproject.toml).

MLflow's own basic-auth app has users with permissions, a data base of them, and a slow hash at every request. Here is
one user, and each request is compared with a password that was made at the server's start.
"""

import base64
import binascii
import hmac
import os

from flows.deploy.asgi import Application, Message, Receive, Send
from flows.deploy.first_visit import with_first_visit

UNGUARDED = "/health"


def create_app() -> Application:
    """MLflow's application for those who know MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.

    Raises:
        RuntimeError: the variables are not set.
    """
    wanted = [os.environ.get(name) for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")]
    if not all(wanted):
        raise RuntimeError("MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD must be set for this server, too")
    from mlflow.server.fastapi_app import app

    return guarded(with_first_visit(app), ":".join(map(str, wanted)))


def guarded(app: Application, credentials: str) -> Application:
    """The application for requests with these credentials ("user:password") that come from no foreign page.

    A browser sends a password that it knows along with the requests of any page, so their `Origin` must be this server.
    """

    async def guard(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and _is_probe(scope)):
            await app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif not _knows(scope, credentials):
            await _refuse(send, 401, [(b"www-authenticate", b'Basic realm="MLflow"')])
        elif _is_foreign(scope):
            await _refuse(send, 403, [])
        else:
            await app(scope, receive, send)

    return guard


def _is_probe(scope: Message) -> bool:
    return scope["method"] == "GET" and scope["path"] == UNGUARDED


def _knows(scope: Message, credentials: str) -> bool:
    scheme, _, coded = _header(scope, b"authorization").partition(b" ")
    try:
        given = base64.b64decode(coded.strip(), validate=True)
    except binascii.Error:
        return False
    return scheme.lower() == b"basic" and hmac.compare_digest(given, credentials.encode())


def _is_foreign(scope: Message) -> bool:
    origin = _header(scope, b"origin")
    return bool(origin) and origin.partition(b"://")[2] != _header(scope, b"host")


def _header(scope: Message, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


async def _refuse(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain"), *headers]}
    )
    await send({"type": "http.response.body", "body": b"Unauthorized" if status == 401 else b"Forbidden"})
