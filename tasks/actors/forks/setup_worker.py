# SPDX-License-Identifier: Apache-2.0
"""Asks for a worker's fork where Ray's own program of this name would import Ray to start the one that asks.

    python setup_worker.py worker.py ARGUMENT ... --language=PYTHON --serialized-runtime-env-context=JSON

Ray starts it for every worker with a runtime environment. What is not as `asks_for_fork` says it leaves to Ray's own.
"""

import importlib.util
import json
import os
import runpy
import shlex
import sys
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
START = "start_worker.py"
CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="


def main(*arguments: str) -> None:
    """Become the program that asks for the fork, or Ray's own."""
    options = {option: _value(option, arguments) for option in (CONTEXT, LANGUAGE)}
    context = json.loads(options[CONTEXT] or "{}")
    command = asks_for_fork(context)
    if not command or options[LANGUAGE] != "PYTHON":
        os.execv(sys.executable, [sys.executable, rays_own(), *arguments])
    os.environ.update(context["env_vars"])
    sys.path[:] = [path for path in sys.path if path != FOLDER]  # it is there for being this file's
    start, place = command
    runpy.run_path(start)["main"](place, *(each for each in arguments if not each.startswith((CONTEXT, LANGUAGE))))


def asks_for_fork(context: dict[str, Any]) -> list[str]:
    """The program start_worker.py and the socket, if variables and that command are all that a runtime environment has.

    The program may be another copy's: runs of several may join a cluster. Not every variable: this process has its path
    already, and Ray's program fills in values of others. Empty for everything else.
    """
    command = shlex.split(context.get("py_executable") or "")
    variables = context.setdefault("env_vars", {})
    others = [name for name, value in context.items() if value and name not in ("py_executable", "env_vars")]
    others += [name for name, value in variables.items() if name == "PYTHONPATH" or "$" in value]
    asks = len(command) == 4 and command[:2] == [sys.executable, "-P"] and os.path.basename(command[2]) == START
    return command[2:] if asks and not others else []


def rays_own() -> str:
    """Ray's own program, found without an import of Ray."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    return os.path.join(os.path.dirname(ray.origin), "_private", "workers", "setup_worker.py")


def _value(option: str, arguments: tuple[str, ...]) -> str:
    return next((each.removeprefix(option) for each in arguments if each.startswith(option)), "")


if __name__ == "__main__":
    main(*sys.argv[1:])
