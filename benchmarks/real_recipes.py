# SPDX-License-Identifier: Apache-2.0
"""A recipe of real size as a deployment on one GPU or several, from a drawn checkpoint to its weights in diffusers.

    python -m benchmarks.real_recipes sd35-ocr-flow-grpo [diffusion-nft ...] [--machine two_h200] [--write]

In a folder of its own: a checkpoint of the published shapes with random weights, prompts, their embeddings by the real
text encoders, `flows.services up`, `prefect deployment run train/<recipe>` with `machines/<machine>.json` for three
iterations; `kill -9` of the flow run's process once the first checkpoint is there, the same command again, and the
exported weights in diffusers' own pipeline. Recipes that are named together share the folder, and so the checkpoint
and the embeddings where they have the same; in a folder of an earlier call both are not made again.

Every stage's seconds are printed as it ends, those to the run's first validation picture too. Adds a line of JSON a
recipe to the log, also where it failed or the limit came first; `--write` puts the newest whole line of each recipe
into docs/recipes.md, of all logs that `--log` names, as those of other machines; rows of other recipes stay. Without
a recipe it does only this. Beside the recipe's own reward stands one that tells noise apart, else all pictures of a
group score 0 and there is nothing to learn.
`--data-only` makes what the recipes' runs read, for another benchmark in that folder.
`--serve` also has vLLM-Omni, where it is installed beside the rest, serve the LoRA (`benchmarks.served_lora`).
`--rehearse` goes the same way with a tiny model of the recipe's family on the CPU.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from mlflow import MlflowClient

from benchmarks.docs import put_table, refuse_missing, rows_by_name, table_of
from benchmarks.local_services import ROOT, ending_at_sigterm, import_path
from tasks.config.errors import ConfigError
from tasks.config.overrides import merged
from tasks.config.recipes import load_parameters
from tasks.config.tree import TrainConfig
from tasks.system.access import exported
from tasks.system.ports import free_port

PAGE, SCRIPT = Path("docs/recipes.md"), "real_recipes.py"
MODELS = {
    "data/stable_diffusion_3_5": ("sd3.5-medium", "stable_diffusion_3"),
    "data/flux": ("flux.1-dev", "flux"),
    "data/qwen_image": ("qwen-image", "qwen_image"),
    "data/wan": ("wan2.2-ti2v-5b", "wan"),
    "data/z_image": ("z-image", "z_image"),
}
"""A recipe's `model.path` -> name in `benchmarks.drawn_checkpoint`, and the adapter's file."""
MACHINES = ("one_h200", "two_h200", "four_h200", "eight_h200")
"""Files of machines/."""
ITERATIONS = 3
LIMIT, DOWN_SECONDS = 3600, 40
REHEARSAL = "benchmarks/rehearsal.json"
"""In place of the machine's file in a rehearsal."""
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
WAYS = ("checkpoint", "embeddings", "to the first checkpoint", "continued")
HEADER = (
    f"| Recipe | {' | '.join(STAGES)} | s an iteration | images/s | peak GiB, trainer and rollout | {' | '.join(WAYS)} "
    "| changed, and what was wrong |"
)
THINGS = ("shop window", "road sign", "birthday cake", "coffee mug", "chalkboard", "train ticket", "red bus", "poster")
WORDS = ("open", "closed", "fresh", "bread", "river", "market", "library", "garden", "winter", "museum", "north")


@dataclass(frozen=True)
class Recipe:
    """What is asked of one recipe."""

    name: str
    config: Mapping[str, Any]
    groups: int
    settings: Sequence[str] = ()
    machine: str = MACHINES[0]
    rehearsed: bool = False

    @property
    def folder(self) -> str:
        """Of its model."""
        return self.config["actor_rollout_ref"]["model"]["path"]

    @property
    def device(self) -> str:
        """Where it computes."""
        return "cpu" if self.rehearsed else "cuda"

    @property
    def machine_overrides(self) -> dict[str, Any]:
        """Those that the machine's file has."""
        return json.loads((ROOT / (REHEARSAL if self.rehearsed else f"machines/{self.machine}.json")).read_text())

    @property
    def gpus(self) -> int:
        """How many the run may have."""
        return self.overrides["trainer"]["n_gpus_per_node"]

    @property
    def prompts(self) -> int:
        """Of an iteration: two optimiser steps, and a rollout micro-batch for each GPU in each of them."""
        return self.groups * self.machine_overrides["trainer"]["n_gpus_per_node"]

    @property
    def run_folders(self) -> str:
        """Pattern of its run's folder: the experiment's name and a digest."""
        return f"runs/{self.config['trainer']['experiment_name']}-{'[0-9a-f]' * 8}"

    @property
    def overrides(self) -> dict[str, Any]:
        """The machine's, three iterations, and so few prompts that they take minutes; then what --set says."""
        rewards = self.config["reward"]["functions"] | {"jpeg_compressibility": {}}
        actor: dict[str, Any] = {"ppo_mini_batch_size": max(1, self.prompts // 2)}
        if "ema" in self.config["actor_rollout_ref"]["actor"]:  # an average of every 8th step would still be the start
            actor["ema"] = {"update_interval": 1}
        small = {
            "data": {"train_batch_size": self.prompts},
            "actor_rollout_ref": {"actor": actor},
            "reward": {"functions": rewards},
            "trainer": {"total_training_steps": ITERATIONS, "save_freq": 1, "test_freq": ITERATIONS},
        }
        overrides = merged(self.machine_overrides, small, TrainConfig)
        for setting in self.settings:
            path, _, value = setting.partition("=")
            change = yaml.safe_load(value)
            for part in reversed(path.split(".")):
                change = {part: change}
            overrides = merged(overrides, change, TrainConfig)
        return overrides


def recipe_of(name: str) -> Mapping[str, Any]:
    """The config of a recipe of prefect.yaml by its deployment's name. Raises RecipeError where there is none."""
    return load_parameters("train", name, ROOT / "prefect.yaml")["config"]


def refuse_what_does_not_go_together(recipes: Iterable[Recipe]) -> None:
    """End with the run's own sentence where it would refuse its overrides, before a checkpoint is drawn for it."""
    for recipe in recipes:
        try:
            TrainConfig.model_validate(recipe.config).with_changes(recipe.overrides)
        except ConfigError as error:
            sys.exit(f"{recipe.name} on {recipe.machine}: {error}")


def workspace(recipe: Recipe, folder: Path) -> None:
    """The project's code, prompts in the form of the public OCR lists, and the data set in params.yaml."""
    for name in ("flows", "tasks", "models", "benchmarks", "tests", "machines", "prefect.yaml", "dvc.yaml"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(ROOT / name)
    draw, raw = random.Random(0), folder / "data" / "raw" / "ocr"
    raw.mkdir(parents=True, exist_ok=True)
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
        "dtype": "float32" if recipe.rehearsed else "bfloat16",
        "device": recipe.device,
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
    """Commands in the folder, each with its seconds, which are printed; none goes on after the limit."""

    def __init__(self, folder: Path, recipe: str, until: float):
        self.folder, self.recipe, self.until = folder, recipe, until
        self.began, self.seconds = time.monotonic(), dict[str, float]()
        self.starting: subprocess.Popen | None = None
        self.environment = os.environ | {
            "PYTHONPATH": import_path(folder),
            "PREFECT_HOME": str(folder / ".prefect"),
            "PYTHONUNBUFFERED": "1",
        }
        (folder / ".prefect").mkdir(exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds until the limit, less what it takes to end the servers."""
        return max(0.0, self.until - DOWN_SECONDS - time.monotonic())

    def say(self, what: str) -> None:
        """A line at once, with the seconds since the recipe's beginning."""
        print(f"[{time.monotonic() - self.began:4.0f} s] {self.recipe}: {what}", flush=True)

    def took(self, what: str, began: float) -> None:
        """Note how long a stage took, and say so."""
        self.seconds[what] = time.monotonic() - began
        self.say(f"{what}: {self.seconds[what]:.1f} s, {shutil.disk_usage(self.folder).free / 2**30:.0f} GiB free")

    def python(self, what: str, *arguments: str) -> None:
        """Run a module to its end.

        Raises:
            RuntimeError: it failed or the limit came, with the end of what it said.
        """
        began = time.monotonic()
        self.wait(what, self.start(*arguments))
        self.took(what, began)

    def wait(self, what: str, process: subprocess.Popen, done: Callable[[], Any] | None = None) -> None:
        """Until the process has ended well, or `done` is true.

        Raises:
            RuntimeError: it or the servers beside it failed, or the limit came; with the end of what was said.
        """
        while not (done and done()):
            code = process.poll()
            if self.starting is not None and self.starting.poll():
                process.terminate()
                raise RuntimeError(f"servers: exit code {self.starting.poll()}\n{self.end_of('output.log')}")
            if code == 0 and done is None:
                return
            if code is not None or not self.left:
                process.terminate()
                why = "the limit came" if code is None else f"exit code {code}"
                raise RuntimeError(f"{what}: {why}\n{self.end_of('output.log')}")
            time.sleep(0.2)

    def end_of(self, name: str) -> str:
        """The last lines of a file of the folder; nothing where it is not there."""
        file = self.folder / name
        return file.read_text(errors="replace")[-3000:] if file.is_file() else ""

    def start(self, *arguments: str) -> subprocess.Popen:
        """A module, not waited for; what it says is added to output.log."""
        with (self.folder / "output.log").open("a") as log:
            command = [sys.executable, "-m", *arguments]
            return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=log, stderr=log)

    @contextmanager
    def servers(self, gpus: int) -> Iterator[Callable[[], None]]:
        """What `make up` starts, beside other work: call what this gives before they are used. They end with it."""
        began = time.monotonic()
        ports = [word for name in ("prefect", "mlflow") for word in (f"--{name}-port", str(free_port()))]
        self.starting = starting = self.start("flows.services", "up", *ports, "--gpus", str(gpus))

        def ready() -> None:
            self.wait("servers", starting)
            self.took("servers", began)
            self.environment |= exported(self.folder / ".services" / "environment")

        try:
            yield ready
        except BaseException:
            self.say(f"the worker's log ends:\n{self.end_of('.services/worker.log')}")
            raise
        finally:
            if starting.poll() is None:
                starting.terminate()
                starting.wait()
            with suppress(subprocess.TimeoutExpired):
                self.start("flows.services", "down").wait(3 * DOWN_SECONDS)

    def flow_run(self) -> psutil.Process | None:
        """The process that the worker started for a run."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if "prefect.engine" in process.cmdline() and process.cwd() == str(self.folder):
                    return process
        return None


def play(recipe: Recipe, machine: Machine) -> dict[str, float]:
    """All of it; the metrics of the finished run."""
    workspace(recipe, machine.folder)
    if earlier := [*machine.folder.glob(recipe.run_folders)]:
        raise RuntimeError(f"{earlier[0]} is of an earlier call: give another folder, or remove runs/ and mlflow.db")
    with machine.servers(recipe.gpus) as ready:
        make_data(recipe, machine)
        ready()
        run_with_a_kill(recipe, machine)
    (weights,) = machine.folder.glob(f"{recipe.run_folders}/weights")
    drawn = [recipe.folder, str(weights), recipe.device]
    machine.python("in diffusers", "benchmarks.real_recipes", "--draw-with", *drawn)
    return metrics_of(machine.folder)


def serve(recipe: Recipe, machine: Machine) -> dict[str, float]:
    """How far a vLLM-Omni server's pictures are from diffusers', as `benchmarks.served_lora` measures it."""
    (weights,) = machine.folder.glob(f"{recipe.run_folders}/weights")
    asked = [recipe.folder, str(weights), "--device", recipe.device, "--times", "300"]
    machine.python("served by vLLM-Omni", "benchmarks.served_lora", *asked)
    lines = [line for line in machine.end_of("output.log").splitlines() if line.startswith('{"base, server')]
    return json.loads(lines[-1])


def make_data(recipe: Recipe, machine: Machine) -> None:
    """Prompts, checkpoint and embeddings, in so far as they are not there."""
    data, model = recipe.config["data"]["name"], MODELS[recipe.folder][0]
    if not (machine.folder / "data" / data / "prompts.parquet").is_file():
        machine.python("prompts", "flows.prepare", "prompts", data)
    if not (machine.folder / recipe.folder / "model_index.json").is_file():
        prompts = ["--device", recipe.device, "--prompts", f"data/{data}/prompts.parquet"]
        drawn = ["benchmarks.drawn_checkpoint", model, recipe.folder, *prompts]
        machine.python("checkpoint", *drawn, *(["--tiny"] if recipe.rehearsed else []))
    if not (machine.folder / "data" / data / "embeddings").is_dir():
        machine.python("embeddings", "flows.prepare", "embeddings", data)


def run_with_a_kill(recipe: Recipe, machine: Machine) -> None:
    """The deployment's run until its first checkpoint, `kill -9` of its process, and the same command to the end."""
    run = ["prefect", "deployment", "run", f"train/{recipe.name}", "--watch"]
    run += ["--param", f"overrides={json.dumps(recipe.overrides)}"]
    began, first = time.monotonic(), machine.start(*run)
    for what, pattern in (("validation picture", "validation/000000.png"), ("checkpoint", "checkpoints/iter_*")):
        files = f"{recipe.run_folders}/{pattern}"
        machine.wait(f"to the first {what}", first, lambda files=files: [*machine.folder.glob(files)])
        machine.took(f"to the first {what}", began)
    killed = machine.flow_run()
    if killed is None:
        raise RuntimeError(f"no flow run to kill\n{machine.end_of('output.log')}")
    killed.kill()
    first.terminate()
    machine.say(f"killed {killed.pid}")
    machine.python("continued", *run)


def metrics_of(folder: Path) -> dict[str, float]:
    """The last value of each metric of the run that finished last."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    finished = [run for run in runs if run.info.status == "FINISHED"]
    return dict(max(finished, key=lambda run: run.info.end_time).data.metrics)


def draw_with(model: str, weights: str, device: str) -> None:
    """Draw a picture, or a short video, of two steps by diffusers' own pipeline with exported weights.

    A folder of LoRA is put on the model; full weights are a model of their own.

    Raises:
        RuntimeError: the LoRA changes nothing.
    """
    import diffusers
    import torch

    lora = (Path(weights) / "pytorch_lora_weights.safetensors").is_file()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    pipeline = diffusers.DiffusionPipeline.from_pretrained(model if lora else weights, dtype=dtype).to(device)
    if lora:
        pipeline.load_lora_weights(weights)
        added = [p.abs().max().item() for name, p in pipeline.transformer.named_parameters() if ".lora_B." in name]
        print("LoRA's largest B:", max(added))
        if not max(added):
            raise RuntimeError("the exported LoRA is as it was before training: it changes nothing")
    side = 64 if device == "cpu" else 512
    video = {"num_frames": 9} if isinstance(pipeline, diffusers.WanPipeline) else {}
    found = pipeline("a sign", num_inference_steps=2, height=side, width=side, output_type="np", **video)[0]
    print("LoRA" if lora else "full weights", "in diffusers:", np.asarray(found).shape, "spread", np.std(found))


def table(lines: Iterable[Mapping[str, Any]], kept: Mapping[str, str]) -> str:
    """One row a recipe: the newest whole line's last iteration and the way there, else where the newest one ended.

    Args:
        lines: of logs.
        kept: rows of recipes that no line is of.
    """
    newest = dict[str, Mapping[str, Any]]()
    for line in lines:
        name = row_name(line)
        if "failed" not in line or "failed" in newest.get(name, line):
            newest[name] = line
    rows = {**kept, **{name: row(name, line) for name, line in newest.items()}}
    return "\n".join([HEADER, "|---" * (HEADER.count("|") - 1) + "|", *rows.values()])


def row_name(line: Mapping[str, Any]) -> str:
    """The recipe and, where it is not the smallest, the machine."""
    machine = line.get("machine", MACHINES[0])
    return f"`{line['recipe']}`" + ("" if machine == MACHINES[0] else f", {machine.replace('_', ' ')}")


def row(name: str, line: Mapping[str, Any]) -> str:
    """A recipe's row, from its line in a log."""
    if "failed" in line:
        said = " ".join(line["failed"].split()).replace("|", "/")[:200]
        return f"| {name} |" + " |" * (HEADER.count("|") - 3) + f" not to its end: {said} |"
    metrics, seconds = line["metrics"], line["seconds"]
    stages = {stage: metrics.get(f"timing_s/{key}", 0.0) for stage, key in STAGES.items()}
    step = metrics["timing_s/step"]
    trained = step - stages["validation"] - stages["checkpoint"]
    peaks = [
        max((value for key, value in metrics.items() if key.startswith(f"memory/{who}/gpu_peak_gib")), default=0)
        for who in ("trainer", "rollout")
    ]
    cells = [
        *(f"{value:.1f}" for value in stages.values()),
        f"{step:.1f}",
        f"{metrics['perf/total_num_images'] / trained:.2f}",
        f"{peaks[0]:.1f} and {peaks[1]:.1f}",
        *(f"{seconds[key]:.0f}" if key in seconds else "there" for key in WAYS),
        ", ".join([*line.get("settings", ()), *filter(None, [line.get("note")])]),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def rows_of(page: Path) -> dict[str, str]:
    """Recipe and machine -> the row in the table of a page; nothing where that has other columns."""
    return rows_by_name(page, SCRIPT) if table_of(page, SCRIPT)[:1] == [HEADER] else {}


@ending_at_sigterm()
def played(recipe: Recipe, folder: Path, until: float, served: bool = False) -> dict[str, Any]:
    """The log's line of a recipe; one that failed says why, and has the seconds of what it did."""
    machine = Machine(folder, recipe.name, until)
    line: dict[str, Any] = {"recipe": recipe.name, "groups": recipe.groups, "settings": list(recipe.settings)}
    line["machine"] = recipe.machine
    try:
        line["metrics"] = play(recipe, machine)
        if served:
            line["served"] = serve(recipe, machine)
            machine.say(f"served: {line['served']}")
    except (RuntimeError, ValueError, OSError) as error:
        machine.say(f"failed: {error}")
        line["failed"] = str(error)
    return line | {"seconds": machine.seconds}


def options() -> argparse.Namespace:
    """What the command was called with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="deployments of prefect.yaml; without one the table alone")
    parser.add_argument("--groups", type=int, default=2, help="prompts an iteration for each of the machine's GPUs")
    parser.add_argument("--machine", choices=MACHINES, default=MACHINES[0], help="a file of machines/")
    parser.add_argument("--set", action="append", default=[], help="field=value of the config; may be repeated")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which this ends, whatever is done")
    parser.add_argument("--folder", type=Path, help="where, and kept (default: a temporary one)")
    logs = "adds to the first, reads all"
    parser.add_argument("--log", type=Path, nargs="+", default=[Path("real_recipes.jsonl")], help=logs)
    parser.add_argument("--note", default="", help="what was wrong, for the table's last column")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE}")
    parser.add_argument("--data-only", action="store_true", help="make checkpoint, prompts and embeddings, and no more")
    parser.add_argument("--serve", action="store_true", help="have vLLM-Omni serve the LoRA, too")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU; not for the table")
    parser.add_argument("--draw-with", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if not chosen.draw_with:
        refuse_missing(parser, chosen.log[bool(chosen.recipes) :])  # the first is made by a recipe's line
    return chosen


def main() -> None:
    """Play the recipes, and show what the log has; exit code 1 if one failed."""
    chosen, until = options(), time.monotonic()
    if chosen.draw_with:
        return draw_with(*chosen.draw_with)
    until += chosen.limit
    new = []
    asked = (chosen.groups, chosen.set, chosen.machine, chosen.rehearse)
    try:
        recipes = [Recipe(name, recipe_of(name), *asked) for name in chosen.recipes]
    except ConfigError as error:
        sys.exit(f"error: {error}")
    refuse_what_does_not_go_together(recipes)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="real-"))
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.data_only:
        for recipe in recipes:
            workspace(recipe, folder)
            make_data(recipe, Machine(folder.resolve(), recipe.name, until))
        return
    for number, recipe in enumerate(recipes):
        new.append(played(recipe, folder.resolve(), until, chosen.serve) | {"note": chosen.note})
        with chosen.log[0].open("a") as log:
            log.write(json.dumps(new[-1]) + "\n")
        if not chosen.folder:  # the disk is small beside these models
            later = {other.folder for other in recipes[number + 1 :]}
            for used in {"runs", recipe.folder} - later:
                shutil.rmtree(folder / used, ignore_errors=True)
    if not chosen.folder:
        shutil.rmtree(folder)
    lines = [json.loads(line) for log in chosen.log for line in log.read_text().splitlines()]
    filled = table(lines, rows_of(ROOT / PAGE))
    print(filled)
    if chosen.write:
        put_table(ROOT / PAGE, SCRIPT, filled)
    sys.exit(any("failed" in line for line in new))


if __name__ == "__main__":
    main()
