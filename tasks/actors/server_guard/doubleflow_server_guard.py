# SPDX-License-Identifier: Apache-2.0
"""Asks who sends a request to a reward model's server for the run's secret, whatever the path.

It runs in the environment of that server, which need not have this project, and so needs nothing but Python: as ASGI
middleware of vLLM (`--middleware doubleflow_server_guard.Guard`), whose own API key guards a part of its paths alone;
and as a program, `python doubleflow_server_guard.py PROGRAM...`, that runs another with every server of uvicorn in it
behind the same question. The folder holds this file alone, as it is on that environment's path.
"""

import hmac
import os
import runpy
import sys
from typing import Any

KEY = "REWARD_MODEL_KEY"
"""Environment variable with the secret."""


class Guard:
    """An ASGI application whose every answer, health included, wants `Authorization: Bearer <secret>`."""

    def __init__(self, app: Any):
        """Stand before `app`. Raises KeyError where there is no secret: a server without one is not to start."""
        self.app, self._wanted = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on what the server itself says to its application, and who knows the secret."""
        given = next((value for name, value in scope.get("headers", ()) if name == b"authorization"), b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._wanted):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})


def main(program: str, *arguments: str) -> None:
    """Run a Python program whose servers are uvicorn's, guarded."""
    import uvicorn

    class Guarded(uvicorn.Config):
        def __init__(self, app: Any, *positional: Any, **named: Any):
            super().__init__(Guard(app), *positional, **named)

    uvicorn.Config = Guarded  # type: ignore[misc]  # a server is made of whatever stands there
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
