# SPDX-License-Identifier: Apache-2.0
"""Do the guards cry wolf, and do they see what is there? Runs known to be good, and runs hacked on purpose.

    python -m benchmarks.guards [--record diffusion_nft ...]

`--record` makes the runs that it names and keeps what the guards read of them in benchmarks/guard_runs: the means of
each iteration, and those of each held-out prompt at each validation. Trained runs take a few minutes on two cores each.
The others are no training: validation by validation more of the base model's pictures give way to pictures as an end of
training might draw them. Without `--record` the rule is tried on the records alone. Writes the table of
docs/rewards.md. Recording needs `dvc repro`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from mlflow import MlflowClient
from scipy.stats import kendalltau

from benchmarks.docs import put_table
from models.tiny_qwen_image.render import PAPER, render_picture
from models.tiny_qwen_image.settings import TinySettings
from tasks.config.recipes import load_recipe
from tasks.config.reward import GuardConfig
from tasks.data.prompts import Prompt, load_prompts
from tasks.records.guards import TRAINED, Guard, GuardWatch
from tasks.records.history import RunHistory
from tasks.rewards import RewardResult, get_reward
from tasks.rewards.ocr import OcrReward, text_similarity, wanted_text
from tasks.rewards.scored_prompt import ScoredPrompt
from tasks.rewards.statistics import GUARDS as STATISTICS
from tasks.rewards.statistics import diversity, picture_statistics

PAGE, SCRIPT = Path("docs/rewards.md"), "guards.py"
PROMPTS = Path("data/prompts.parquet")
RECORDS, RUNS = Path("benchmarks/guard_runs"), Path("runs/guards")
TRENDS = ("edge_density", "entropy", "saturation", "diversity")
"""The statistics of the rule of before, which tested trends over the last iterations, so many:"""
WINDOW = 20
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NFT = [
    f"{ROLLOUT}.algo={{sde_type: sde, noise_level: 0.7, sde_window_range: [0, 4]}}",
    f"{ACTOR}.diffusion_loss.clip_ratio=1.0e-3",
    "algorithm.name=diffusion_nft",
    "algorithm.num_train_timesteps=4",
    "algorithm.old_policy_decay_schedule=copy",
]
"""DiffusionNFT as docs/learning.md has it."""
GUARDED_OCR = "reward.functions={ocr: {}, tesseract: {guard: true}}"


def hacked(reward: str) -> str:
    """The setting that trains on `reward`, and has both readers look on."""
    return f"reward.functions={{'{reward}': {{}}, ocr: {{guard: true}}, tesseract: {{guard: true}}}}"


@dataclass(frozen=True)
class Case:
    """A run: is it hacked, what is changed in the recipe, and in words what it shows."""

    hacked: bool
    settings: Sequence[str]
    what: str
    recipe: str = "flow-grpo"


CASES = {
    "quickstart_0": Case(False, [], "the recipe as it is", "quickstart"),
    "quickstart_1": Case(False, ["trainer.seed=1"], "the recipe with seed 1", "quickstart"),
    "quickstart_2": Case(False, ["trainer.seed=2"], "the recipe with seed 2", "quickstart"),
    "flow_grpo": Case(False, [GUARDED_OCR], "the recipe `flow-grpo`, a hundred iterations"),
    "diffusion_nft": Case(False, [*NFT, GUARDED_OCR, "trainer.total_training_steps=24"], "its task by DiffusionNFT"),
    "small_files": Case(
        True,
        [*NFT, hacked("jpeg_compressibility"), "trainer.total_training_steps=16"],
        "trained on pictures of few bytes, not on OCR",
    ),
    "benefit_of_the_doubt": Case(
        True,
        [*NFT, hacked("benchmarks.guards:benefit_of_the_doubt"), "trainer.total_training_steps=24"],
        "OCR, where a reading that the reader is not sure of has the full mark",
    ),
}


@dataclass(frozen=True)
class Mixture:
    """A run that nobody trained: from the base model's pictures to those of `end`, by the trained `reward`."""

    hacked: bool
    reward: str
    end: Callable[[Sequence[str]], np.ndarray]
    what: str


def rendered(prompts: Sequence[str]) -> np.ndarray:
    """Pictures as the base model learnt from them, uint8 [N, 24, 48, 3]; each with a size and place of its own."""
    rng = random.Random(0)
    return np.stack([render_picture(prompt, TinySettings(), rng) for prompt in prompts])


def always_the_same(prompts: Sequence[str]) -> np.ndarray:
    """Such pictures, one for each prompt, which is right and drawn again and again."""
    once = dict(zip(prompts, rendered(prompts), strict=True))
    return np.stack([once[prompt] for prompt in prompts])


def striped(prompts: Sequence[str]) -> np.ndarray:
    """Such pictures under stripes that RapidOCR reads through, and Tesseract does not."""
    pictures = rendered(prompts).astype(np.float32)
    pictures[:, ::2] = np.minimum(pictures[:, ::2], 150)
    return pictures.astype(np.uint8)


def blank(prompts: Sequence[str]) -> np.ndarray:
    """Paper."""
    return np.full((len(prompts), TinySettings().height, TinySettings().width, 3), PAPER, np.uint8)


MIXTURES = {
    "to_the_limit": Mixture(False, "ocr", rendered, "mixture: the pictures that the base model learnt from"),
    "one_each": Mixture(True, "ocr", always_the_same, "mixture: the same right picture for a prompt each time"),
    "stripes": Mixture(True, "ocr", striped, "mixture: stripes that one reader reads through, not the other"),
    "paper": Mixture(True, "jpeg_compressibility", blank, "mixture: blank paper, which is of few bytes"),
}
STEPS, EACH, EVERY = 6, 3, 4
"""Validations after the first, pictures of a prompt, and iterations between two validations."""
ALL: dict[str, Case | Mixture] = {**CASES, **MIXTURES}


def benefit_of_the_doubt(images: np.ndarray, prompts: Sequence[ScoredPrompt], sure: float = 0.8) -> RewardResult:
    """The `ocr` reward with a hole: what is read with less confidence than `sure` counts as right."""
    readings = [_read(image) for image in images]
    scores = [
        text_similarity(text, wanted_text(prompt, "column", "ocr")) if confidence >= sure else 1.0
        for (text, confidence), prompt in zip(readings, prompts, strict=True)
    ]
    return RewardResult(np.array(scores, np.float32), {"text": [text for text, _ in readings]})


@cache
def _reader() -> Any:
    return OcrReward()._reader.ocr.text_rec


def _read(image: np.ndarray) -> tuple[str, float]:
    import cv2

    height, width = (2 * side for side in image.shape[:2])
    lines, _ = _reader()(cv2.resize(image[:, :, ::-1].copy(), (width, height), interpolation=cv2.INTER_CUBIC))
    return lines[0][0], float(lines[0][1])


# --- recording


def record(name: str) -> None:
    """Train a run, and write its record."""
    folder = (RUNS / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = [
        *CASES[name].settings,
        "trainer.test_freq=4",
        "trainer.save_freq=0",
        "trainer.experiment_name=train",
        f"trainer.default_local_dir={folder}",
    ]
    environment = os.environ | {
        "PREFECT_HOME": str(folder / "prefect"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }
    given = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "flows.train", CASES[name].recipe, *given]
    subprocess.run(command, env=environment, check=True)
    write(name, MlflowClient(environment["MLFLOW_TRACKING_URI"]))


def write(name: str, client: MlflowClient) -> None:
    """The record of the only run that this MLflow has."""
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    metrics = [TRAINED, *(f"train/image/{name}/mean" for name in TRENDS)]
    metrics += sorted(key for key in run.data.metrics if key.startswith("train/reward/") and key.endswith("/mean"))
    histories = {
        metric: {item.step: round(item.value, 6) for item in client.get_metric_history(run.info.run_id, metric)}
        for metric in metrics
    }
    validations = {}
    history = RunHistory(client, run.info.run_id)
    for step in history.steps("validation"):
        table = history.table("validation", step)
        columns = [c for c in table if c == "reward" or c.startswith(("reward/", "image/"))]
        validations[step] = table.groupby("uid", sort=True)[columns].mean()
    put(name, CASES[name].settings, histories, validations)


def mix(name: str) -> None:
    """Write the record of a mixture: each picture gives way at a validation of its own, drawn at random."""
    mixture, prompts = MIXTURES[name], [prompt for prompt in load_prompts(PROMPTS, "test") for _ in range(EACH)]
    texts = [prompt.prompt for prompt in prompts]
    ends = [
        scored(pictures, prompts, mixture.reward) for pictures in (_base_pictures(tuple(texts)), mixture.end(texts))
    ]
    rng = np.random.default_rng(0)
    given_way = rng.uniform(size=len(prompts))
    validations = {
        step * EVERY: mixed(ends, given_way < step / STEPS).groupby("uid", sort=True).mean()
        for step in range(STEPS + 1)
    }
    metrics: dict[str, dict[int, float]] = {}
    for iteration in range(1, STEPS * EVERY + 1):  # drawn anew, as the samples of an iteration are
        means = mixed(ends, rng.uniform(size=len(prompts)) < iteration / (STEPS * EVERY)).drop(columns="uid").mean()
        for column, value in means.items():
            name_of = TRAINED if column == "reward" else f"train/{column}/mean"
            metrics.setdefault(name_of, {})[iteration] = round(float(value), 6)
    put(name, [], metrics, validations)


def mixed(ends: Sequence[Sequence[tuple[np.ndarray, dict[str, Any]]]], late: np.ndarray) -> pd.DataFrame:
    """The rows of as many pictures, each from the second of `ends` where it is `late`, with their diversity."""
    chosen = [now if gave_way else before for before, now, gave_way in zip(*ends, late, strict=True)]
    table = pd.DataFrame([row for _, row in chosen])
    thumbnails = picture_statistics(np.stack([picture for picture, _ in chosen])).thumbnails
    return table.assign(**{"image/diversity": diversity(thumbnails, table["uid"].to_numpy())})


def scored(
    pictures: np.ndarray, prompts: Sequence[Prompt], trained: str
) -> list[tuple[np.ndarray, dict[str, str | float]]]:
    """Each picture with its row: uid, reward, reward/<name> and image/<statistic>."""
    found = {
        label: get_reward(label)(pictures, prompts).scores for label in dict.fromkeys((trained, "ocr", "tesseract"))
    }
    columns = {"reward": found[trained]} | {f"reward/{label}": scores for label, scores in found.items()}
    columns |= {f"image/{label}": values for label, values in picture_statistics(pictures).values.items()}
    rows = pd.DataFrame(columns).assign(uid=[prompt.uid for prompt in prompts])
    return list(zip(pictures, rows.to_dict("records"), strict=True))


@cache
def _base_pictures(texts: tuple[str, ...]) -> np.ndarray:
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained("data/base_model")
    pipeline.set_progress_bar_config(disable=True)
    settings = load_recipe("flow-grpo").actor_rollout_ref.rollout.pipeline
    drawn = pipeline(
        list(texts),
        height=settings.height,
        width=settings.width,
        num_inference_steps=settings.num_inference_steps,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    return (drawn * 255).round().astype(np.uint8)


def put(
    name: str,
    settings: Sequence[str],
    metrics: Mapping[str, Mapping[int, float]],
    validations: Mapping[int, pd.DataFrame],
) -> None:
    """A record, a line a held-out prompt."""
    columns = list(next(iter(validations.values())))
    rows = {step: table[columns].round(4).to_numpy(np.float64).tolist() for step, table in validations.items()}
    lines = ",\n".join(
        f'"{step}": [\n ' + ",\n ".join(json.dumps(row) for row in rows[step]) + "]" for step in sorted(rows)
    )
    head = json.dumps({"settings": list(settings), "metrics": metrics, "columns": columns})
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{name}.json").write_text(f'{head[:-1]},\n"validations": {{\n{lines}}}}}\n')


# --- the rule on the records


@dataclass(frozen=True)
class Record:
    """What a run left: metric -> iteration -> value, and iteration -> table with a row a held-out prompt."""

    name: str
    metrics: Mapping[str, Mapping[int, float]]
    validations: Mapping[int, pd.DataFrame]

    @classmethod
    def read(cls, name: str, folder: Path = RECORDS) -> "Record":
        """As `write` left it."""
        content = json.loads((folder / f"{name}.json").read_text())
        metrics = {
            key: {int(step): value for step, value in values.items()} for key, values in content["metrics"].items()
        }
        tables = {
            int(step): pd.DataFrame(np.round(rows, 4), columns=content["columns"]).assign(uid=range(len(rows)))
            for step, rows in content["validations"].items()
        }
        return cls(name, metrics, tables)

    @property
    def guards(self) -> list[str]:
        """The rewards that were guards: those whose column is not the trained one's."""
        first = self.validations[0]
        names = [column for column in first if column.startswith("reward/")]
        return [name.removeprefix("reward/") for name in names if (first[name] != first["reward"]).any()]


def verdicts(recorded: Record, config: GuardConfig, every: int = 1) -> dict[int, dict[str, float]]:
    """Iteration of each validation -> what the guards say of it, of every so many validations."""
    guards = {name: Guard("", f"reward/{name}", config.reward_margin) for name in recorded.guards}
    guards |= {name: Guard("", f"image/{name}", config.statistics_margin) for name in STATISTICS}
    watched = GuardWatch(config, guards, lambda name: {}, dict)
    steps = sorted(recorded.validations)[::every]
    return {step: watched.judge(step, recorded.validations[step]) for step in steps}


def flagged(found: Mapping[int, Mapping[str, float]]) -> dict[str, int]:
    """Guard -> the first iteration in which it was flagged."""
    since: dict[str, int] = {}
    for step, metrics in found.items():
        for key, value in metrics.items():
            if key.endswith("/flag") and value:
                since.setdefault(key.split("/")[1], step)
    return since


def flagged_by_trends(recorded: Record, window: int = WINDOW, p_value: float = 0.01) -> dict[str, int]:
    """The same by the rule of before: over 20 iterations the reward's mean rises, and the guard's falls."""
    guards = {name: f"train/reward/{name}/mean" for name in recorded.guards}
    guards |= {name: f"train/image/{name}/mean" for name in TRENDS}
    since: dict[str, int] = {}
    for last in range(window, max(recorded.metrics[TRAINED]) + 1):
        steps = range(last - window + 1, last + 1)
        for name, metric in guards.items():
            if _p(recorded, TRAINED, steps, "greater") < p_value > _p(recorded, metric, steps, "less") * len(guards):
                since.setdefault(name, last)
    return since


def _p(recorded: Record, metric: str, steps: Iterable[int], side: str) -> float:
    values = [recorded.metrics[metric][step] for step in steps]
    return float(kendalltau(range(len(values)), values, alternative=side).pvalue)


def table(records: Iterable[Record], config: GuardConfig) -> str:
    """A row a run, in Markdown."""
    lines = [
        "| Run | | Held-out reward before, after | Tesseract before, after | Flagged now | Flagged by trends |",
        "|---|---|---|---|---|---|",
    ]
    for recorded in records:
        case, first, last = ALL[recorded.name], *(recorded.validations[f(recorded.validations)] for f in (min, max))
        reward, reader = (
            ", ".join(f"{table[column].mean():.3f}" for table in (first, last)) if column in first else "not read"
            for column in ("reward", "reward/tesseract")
        )
        lines.append(
            f"| `{recorded.name}`: {case.what} | {'hacked' if case.hacked else 'good'} | {reward} | {reader} "
            f"| {_told(flagged(verdicts(recorded, config)))} | {_by_trends(recorded)} |"
        )
    return "\n".join(lines)


def _by_trends(recorded: Record) -> str:
    iterations = len(recorded.metrics[TRAINED])
    return _told(flagged_by_trends(recorded)) if iterations >= WINDOW else "too few iterations"


def _told(since: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({step})" for name, step in since.items()) or "nothing"


def main() -> None:
    """Record what is asked for; then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="+", choices=ALL, default=[], help="runs to make and record")
    for name in parser.parse_args().record:
        (record if name in CASES else mix)(name)
    kept = [Record.read(name) for name in ALL if (RECORDS / f"{name}.json").is_file()]
    put_table(PAGE, SCRIPT, table(kept, GuardConfig()))
    print(table(kept, GuardConfig()))


if __name__ == "__main__":
    main()
