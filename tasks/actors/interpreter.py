# SPDX-License-Identifier: Apache-2.0
"""Trainer actors under an interpreter of their own: an engine whose libraries cannot be in the run's environment."""

import json
import os
import platform
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models.config.actor import DiffusionActorConfig
from models.import_paths import check_allowed, check_allowed_program
from tasks.config.errors import ConfigError

FIELD = "actor_rollout_ref.actor.python"
NEEDED = (
    *("models", "tasks"),  # this project
    *("torch", "diffusers", "peft", "tensordict", "safetensors", "pydantic", "psutil", "prefect"),
)
"""What a trainer actor imports, whatever its engine."""
LIBRARIES = {"fsdp2": "torch", "veomni": "veomni"}
"""What the project's engines need beside it; one of an import path is looked for by its package."""
PROBE = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
try:
    ray = version("ray")
except PackageNotFoundError:
    ray = None
missing = [name for name in sys.argv[1:] if find_spec(name) is None]
print(json.dumps({"python": platform.python_version(), "ray": ray, "missing": missing}))
"""
PROBE_SECONDS = 120


def own_environment(python: str) -> dict[str, Any]:
    """Ray's runtime environment for an actor that this interpreter is to run; all else is as in the others'."""
    return {"py_executable": shlex.quote(os.path.abspath(python))}  # not resolved: a link's place tells the environment


def check_interpreter(actor: DiffusionActorConfig) -> None:
    """`actor.python` can run the trainer's actors; asks it, without importing what takes long.

    Ray takes processes of its own version and of the very same Python alone.

    Raises:
        ConfigError: it is no interpreter, of another version of Python or Ray, or lacks a library.
        ModuleNotAllowed: this machine's setting does not allow it, or the engine.
    """
    python, strategy = actor.python, actor.strategy
    if python is None:
        return
    if ":" in strategy:
        check_allowed(strategy)
    check_allowed_program(FIELD, python)
    engine = LIBRARIES.get(strategy, strategy.partition(":")[0].partition(".")[0])
    found = _asked(python, [*NEEDED, engine])
    own = {"python": platform.python_version(), "ray": version("ray")}
    for name, needed in own.items():
        if found[name] != needed:
            raise ConfigError(
                f"{FIELD} is {python}, which has {name} {found[name]}, but this run's is {needed} and Ray lets no "
                "others join: make that environment with the same"
            )
    if found["missing"]:
        raise ConfigError(
            f"{FIELD} is {python}, whose environment lacks {', '.join(found['missing'])}: install them there "
            "(docs/training.md)"
        )


def _asked(python: str, names: list[str]) -> dict[str, Any]:
    """Its versions, and which of these it lacks. In the driver's folder, which Ray puts on the actors' path, too."""
    if not Path(python).is_file():
        raise ConfigError(f"{FIELD} is {python}, which does not exist: give /folder/bin/python of another environment")
    try:
        answer = subprocess.run(
            [os.path.abspath(python), "-c", PROBE, *names],
            capture_output=True,
            text=True,
            check=True,
            timeout=PROBE_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        return json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise ConfigError(
            f"{FIELD} is {python}, which does not answer as an interpreter of Python ({' '.join(said)}): give "
            "/folder/bin/python of another environment"
        ) from error
