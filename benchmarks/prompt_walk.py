# SPDX-License-Identifier: Apache-2.0
"""How many files a prompt passes in an iteration, of the driver and of actors: those whose functions were given it."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
VARIABLE = "DOUBLEFLOW_PROMPT_WALK"
SITE = "from benchmarks.prompt_walk import follow\nfollow()\n"
FLOORS = ("flows", "tasks", "models")
HELD = {
    *(
        "Prompt",
        "NoiseKey",
        "PromptTable",
        "RolloutRequest",
        "Denoising",
        "Trajectories",
        "RolloutReply",
        "PendingBatch",
    ),
    *("PendingCall", "PendingScores", "RewardResult", "Scores", "SampledIteration", "RankBatch", "RankMiniBatch"),
    *("ActorBatch", "TensorDict", "DiffusionLossResult", "Tensor", "ndarray", "DataFrame"),
}
"""Types of what a prompt and its samples are on their way."""
NOT_OF_PROMPTS = "models/weights/"
"""Its tensors are the policy's."""
ITERATION = 2
CHANGES = ("total_training_steps=3", "val_before_train=false", "test_freq=0", "save_freq=0")


def follow() -> None:
    """From now on this process writes down which files are called with what, where `VARIABLE` says so."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    file = os.open(Path(folder) / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    last: dict[str, float] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        path, now = frame.f_code.co_filename.removeprefix(f"{ROOT}/"), time.time()
        if event not in ("call", "return") or not path.startswith(FLOORS):
            return
        if path == "flows/train.py" and frame.f_code.co_name == "iterate" and frame.f_locals["number"] == ITERATION:
            os.write(file, f"{now} {event}\n".encode())
        elif event == "call" and now - last.get(path, 0) > 0.01 and HELD & set(kinds(list(frame.f_locals.values()))):
            last[path] = now
            os.write(file, f"{now} {path}\n".encode())

    threading.setprofile(look)
    sys.setprofile(look)


def kinds(value: Any, depth: int = 0) -> Iterator[str]:
    """Names of the types of a value and, of lists and mappings, of what is in them."""
    yield type(value).__name__
    if depth < 3 and isinstance(value, list | tuple | dict):
        inner = list(value.values()) if isinstance(value, dict) else value
        for one in inner if depth == 0 else inner[:4]:
            yield from kinds(one, depth + 1)


def passed(folder: Path) -> set[str]:
    """The files that were called with a prompt's samples within the iteration."""
    lines = [line.split() for file in folder.iterdir() for line in file.read_text().splitlines()]
    (begun,) = (float(at) for at, what in lines if what == "call")
    (ended,) = (float(at) for at, what in lines if what == "return")
    return {what for at, what in lines if begun <= float(at) <= ended and what.endswith(".py")}


def main(data: Annotated[Path, typer.Option(help="The folder that `make data` fills.")] = ROOT / "data") -> None:
    """Train the recipe `flow-grpo` for three iterations, a few minutes, and list the files of the second one."""
    with tempfile.TemporaryDirectory() as folder:
        site, notes, there = (Path(folder) / name for name in ("site", "notes", "run"))
        for made in (site, notes, there):
            made.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        shutil.copy(ROOT / "prefect.yaml", there)
        (there / "data").symlink_to(data.resolve())
        environment = os.environ | {"PYTHONPATH": f"{site}:{ROOT}", VARIABLE: str(notes)}
        changes = [word for change in CHANGES for word in ("--set", f"trainer.{change}")]
        command = [sys.executable, "-m", "flows.train", "flow-grpo", *changes]
        subprocess.run(command, cwd=there, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = sorted(path for path in passed(notes) if not path.startswith(NOT_OF_PROMPTS))
    typer.echo("\n".join(found))
    typer.echo(f"{len(found)} files")


if __name__ == "__main__":
    typer.run(main)
