# SPDX-License-Identifier: Apache-2.0
"""A recipe of real size as a deployment on one GPU, from a drawn checkpoint to its weights in diffusers.

    python -m benchmarks.real_recipes sd35-ocr-flow-grpo [--groups 2] [--folder FOLDER] [--log FILE] [--write]

In a folder of its own: a checkpoint of the published shapes with random weights, prompts, their embeddings by the real
text encoders, `flows.services up`, `prefect deployment run train/<recipe>` with `machines/one_h200.json` for three
iterations; `kill -9` of the flow run's process once the first checkpoint is there, the same command again, and the
exported LoRA in diffusers' own pipeline. Adds a line of JSON to the log; `--write` puts the log's newest line of each
recipe into docs/recipes.md. Beside the recipe's own reward stands one that tells noise apart, else all pictures of a
group score 0 and there is nothing to learn.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from mlflow import MlflowClient

from benchmarks.docs import put_table
from benchmarks.local_services import ROOT, wait_until
from flows.deploy.access import exported
from tasks.config.overrides import merged

PAGE, SCRIPT = Path("docs/recipes.md"), "real_recipes.py"
MODELS = {
    "data/stable_diffusion_3_5": ("sd3.5-medium", "stable_diffusion_3"),
    "data/flux": ("flux.1-dev", "flux"),
    "data/qwen_image": ("qwen-image", "qwen_image"),
    "data/wan": ("wan2.2-ti2v-5b", "wan"),
    "data/z_image": ("z-image", "z_image"),
}
"""A recipe's `model.path` -> name in `benchmarks.drawn_checkpoint`, and the adapter's file."""
ITERATIONS = 3
PORTS = {"prefect": 4390, "mlflow": 5390}
STAGES = {
    "rollout": "gen",
    "reward": "reward",
    "update": "update_actor",
    "sync": "update_weights",
    "sleep": "sleep",
    "checkpoint": "save_checkpoint",
    "validation": "testing",
}
"""Column of the table -> `timing_s/...`."""
THINGS = ("shop window", "road sign", "birthday cake", "coffee mug", "chalkboard", "train ticket", "red bus", "poster")
WORDS = ("open", "closed", "fresh", "bread", "river", "market", "library", "garden", "winter", "museum", "north")


@dataclass(frozen=True)
class Recipe:
    """What is asked of one recipe."""

    name: str
    config: Mapping[str, Any]
    groups: int

    @property
    def folder(self) -> str:
        """Of its model."""
        return self.config["actor_rollout_ref"]["model"]["path"]

    @property
    def overrides(self) -> dict[str, Any]:
        """The machine's, three iterations, and so few prompts that they take minutes."""
        rewards = self.config["reward"]["functions"] | {"jpeg_compressibility": {}}
        small = {
            "data": {"train_batch_size": self.groups},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": max(1, self.groups // 2)}},
            "reward": {"functions": rewards},
            "trainer": {"total_training_steps": ITERATIONS, "save_freq": 1, "test_freq": ITERATIONS},
        }
        return merged(json.loads((ROOT / "machines" / "one_h200.json").read_text()), small)


def recipe_of(name: str, groups: int) -> Recipe:
    """A recipe of prefect.yaml by its deployment's name."""
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    (found,) = (entry for entry in deployments if entry["name"] == name)
    return Recipe(name, found["parameters"]["config"], groups)


def workspace(recipe: Recipe, folder: Path) -> None:
    """The project's code, prompts in the form of the public OCR lists, and the data set in params.yaml."""
    for name in ("flows", "tasks", "models", "benchmarks", "tests", "machines", "prefect.yaml", "dvc.yaml"):
        (folder / name).symlink_to(ROOT / name)
    draw, raw = random.Random(0), folder / "data" / "raw" / "ocr"
    raw.mkdir(parents=True)
    texts = [" ".join(draw.sample(WORDS, 2)) for _ in range(400)]
    lines = list(dict.fromkeys(f'a {draw.choice(THINGS)} with the words "{text}"' for text in texts))
    for split, part in (("train", lines[:96]), ("test", lines[96:104])):
        (raw / f"{split}.txt").write_text("\n".join(part) + "\n")
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    name, pipeline = recipe.config["data"]["name"], recipe.config["actor_rollout_ref"]["rollout"]["pipeline"]
    files = [{"file": f"data/raw/ocr/{split}.txt", "split": split} for split in ("train", "test")]
    embeddings = {
        "model": recipe.folder,
        "adapter": f"models/families/{MODELS[recipe.folder][1]}.py",
        "dtype": "bfloat16",
        "device": "cuda",
        "max_sequence_length": pipeline.get("max_sequence_length", 512),
        "batch_size": 8,
    }
    params["data_sets"][name] = {
        "folder": f"data/{name}",
        "prompts": {"files": files, "n_test": 0, "n_train": None, "seed": 0, "target_pattern": '"([^"]+)"'},
        "embeddings": params["data_sets"]["digits"]["embeddings"] | embeddings,
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(params))


class Machine:
    """Commands in the folder, one after the other, each with its seconds."""

    def __init__(self, folder: Path):
        self.folder, self.seconds = folder, dict[str, float]()
        self.environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        self.environment["PREFECT_HOME"] = str(folder / ".prefect")
        (folder / ".prefect").mkdir()

    def python(self, what: str, *arguments: str) -> None:
        """Run a module to its end.

        Raises:
            RuntimeError: it failed, with the end of what it said.
        """
        process = self.start(*arguments)
        began = time.perf_counter()
        if process.wait():
            raise RuntimeError(f"{what} failed: {(self.folder / 'output.log').read_text()[-2000:]}")
        self.seconds[what] = time.perf_counter() - began

    def start(self, *arguments: str) -> subprocess.Popen:
        """The same without waiting; what it says is added to output.log."""
        with (self.folder / "output.log").open("a") as log:
            command = [sys.executable, "-m", *arguments]
            return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=log, stderr=log)

    @contextmanager
    def servers(self) -> Iterator[None]:
        """What `make up` starts, and ends."""
        ports = [word for name, port in PORTS.items() for word in (f"--{name}-port", str(port))]
        self.python("servers", "flows.services", "up", *ports, "--gpus", "1")
        self.environment |= exported(self.folder / ".services" / "environment")
        try:
            yield
        finally:
            self.python("down", "flows.services", "down")

    def flow_run(self) -> psutil.Process | None:
        """The process that the worker started for a run."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if "prefect.engine" in process.cmdline() and process.cwd() == str(self.folder):
                    return process
        return None


def play(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """All of it; the line of the log."""
    workspace(recipe, folder)
    machine, data = Machine(folder), recipe.config["data"]["name"]
    machine.python("prompts", "flows.prepare", "prompts", data)
    drawn = ["--device", "cuda", "--prompts", f"data/{data}/prompts.parquet"]
    machine.python("checkpoint", "benchmarks.drawn_checkpoint", MODELS[recipe.folder][0], recipe.folder, *drawn)
    machine.python("embeddings", "flows.prepare", "embeddings", data)
    run = ["prefect", "deployment", "run", f"train/{recipe.name}", "--watch"]
    run += ["--param", f"overrides={json.dumps(recipe.overrides)}"]
    with machine.servers():
        began, first = time.perf_counter(), machine.start(*run)
        wait_until(lambda: [*folder.glob("runs/*/checkpoints/iter_*")] or first.poll(), 1200, "the first checkpoint")
        machine.seconds["to the first checkpoint"] = time.perf_counter() - began
        killed = machine.flow_run()
        if killed is None:
            raise RuntimeError(f"no flow run to kill: {(folder / 'output.log').read_text()[-2000:]}")
        killed.kill()
        first.terminate()
        machine.python("continued", *run)
    metrics = metrics_of(folder)
    machine.python("LoRA in diffusers", "benchmarks.real_recipes", "--load-lora", recipe.folder)
    return {"recipe": recipe.name, "seconds": machine.seconds, "metrics": metrics}


def metrics_of(folder: Path) -> dict[str, float]:
    """The newest value of each metric of the only run."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    (finished,) = (run for run in runs if run.info.status == "FINISHED")
    return dict(finished.data.metrics)


def load_lora(model: str) -> None:
    """Put the exported LoRA into diffusers' pipeline and draw a picture of two steps."""
    import diffusers
    import torch

    (weights,) = Path("runs").glob("*/weights")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(model, torch_dtype=torch.bfloat16).to("cuda")
    pipeline.load_lora_weights(weights)
    print(pipeline("a sign", num_inference_steps=2, height=512, width=512).images[0].size)


def table(lines: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a recipe: the last iteration's stages, and the way there."""
    ways = ("checkpoint", "embeddings", "to the first checkpoint", "continued")
    found = [f"| Recipe | {' | '.join(STAGES)} | s an iteration | peak GiB, trainer and rollout | {' | '.join(ways)} |"]
    found.append("|---" * (4 + len(STAGES) + len(ways) - 1) + "|")
    for name, line in lines.items():
        metrics, seconds = line["metrics"], line["seconds"]
        stages = " | ".join(f"{metrics.get(f'timing_s/{key}', 0):.1f}" for key in STAGES.values())
        peaks = [
            max((value for key, value in metrics.items() if key.startswith(f"memory/{who}/gpu_peak_gib")), default=0)
            for who in ("trainer", "rollout")
        ]
        way = " | ".join(f"{seconds[key]:.0f}" for key in ways)
        step = metrics["timing_s/step"]
        found.append(f"| `{name}` | {stages} | {step:.1f} | {peaks[0]:.1f} and {peaks[1]:.1f} | {way} |")
    return "\n".join(found)


def main() -> None:
    """Play one recipe, and show what the log has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="a deployment of prefect.yaml; without one the table alone")
    parser.add_argument("--groups", type=int, default=2, help="prompts an iteration")
    parser.add_argument("--folder", type=Path, help="where; it must not exist (default: a temporary one)")
    parser.add_argument("--log", type=Path, default=Path("real_recipes.jsonl"))
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE}")
    parser.add_argument("--load-lora", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.load_lora:
        return load_lora(chosen.load_lora)
    if chosen.recipe:
        folder = chosen.folder or Path(tempfile.mkdtemp(prefix="real-"))
        folder.mkdir(parents=True, exist_ok=True)
        line = play(recipe_of(chosen.recipe, chosen.groups), folder.resolve())
        with chosen.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
    lines = {line["recipe"]: line for line in map(json.loads, chosen.log.read_text().splitlines())}
    print(table(lines))
    if chosen.write:
        put_table(PAGE, SCRIPT, table(lines))


if __name__ == "__main__":
    main()
