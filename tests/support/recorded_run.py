# SPDX-License-Identifier: Apache-2.0
"""A run's record without the run: metrics, tables and pictures of any length, in memory or in MLflow."""

from typing import Any

import numpy as np
import pandas as pd
from mlflow.entities import Param, Run, RunData, RunInfo, RunTag
from PIL import Image, ImageDraw

from tasks.config.tree import TrainConfig
from tasks.records.pictures import grid
from tasks.records.tracking import Tracker
from tasks.report.recorded import PLACEHOLDERS, Recorded, as_json, by_prompt, validation_samples
from tasks.report.samples import extremes
from tasks.report.thumbnails import of_grid

STAGES = {
    "gen": 2.1,
    "reward": 0.3,
    "update_actor": 1.4,
    "update_weights": 0.2,
    "testing": 0.5,
    "log": 0.1,
    "report": 0.05,
}
PROMPTS = [f"the number {number}" for number in range(48)]
HOSTILE = "<script>alert(1)</script> & \"quotes\" 'of' <img src=http://evil.example/x.png>"


def config_of(total: int, **settings: Any) -> TrainConfig:
    """A small config with a trained reward and a guard."""
    functions = {"ocr": {}, "jpeg_compressibility": {"guard": True}}
    trainer = {"total_training_steps": total, "experiment_name": "quickstart"}
    return TrainConfig.model_validate({"reward": {"functions": functions}, "trainer": trainer, **settings})


def level(step: int, total: int) -> float:
    """A reward that rises and levels off."""
    return 0.53 + 0.41 * (1 - float(np.exp(-4 * step / total)))


def metrics_of(step: int, total: int, rng: np.random.Generator, others: int = 0) -> dict[str, float]:
    """What an iteration records."""
    reward, seconds = level(step, total), sum(STAGES.values()) + 0.1
    found = {f"timing_s/{name}": value * rng.uniform(0.9, 1.1) for name, value in STAGES.items()}
    found["timing_s/sync/load"] = 0.1  # in no sum
    found |= {"timing_s/step": seconds, "perf/orchestration_s": 0.1, "perf/orchestration_share": 0.1 / seconds}
    found |= {"critic/rewards/mean": reward + rng.normal(0, 0.03), "train/reward/ocr/mean": reward}
    found |= {"train/reward/jpeg_compressibility/mean": -3 + 0.2 * step / total, "reward/ocr/missing": float(step == 3)}
    found |= {"guard/jpeg_compressibility/tau": -0.4, "guard/jpeg_compressibility/flag": float(step > 8)}
    found["held_out/collapse/flag"] = 0.0
    found |= {"guard/jpeg_compressibility/fall": 0.25}
    found |= {"actor/pg_clipfrac": rng.uniform(0, 0.2), "actor/grad_norm": rng.lognormal(), "actor/lr": 1e-4}
    found |= {"critic/rewards/std_mean": 0.3, "critic/rewards/zero_std_ratio": 0.1, "train/image/diversity/mean": 0.4}
    found |= {"cost/hours": step * seconds / 3600, "cost/gpu_hours": step * seconds / 900, "cost/images": step * 192.0}
    found |= {"perf/total_num_images": 192.0, "trainer/global_step": float(step)}
    return found | {f"other/metric_{n}": rng.normal() for n in range(others)}


def table_of(prompts: list[str], samples: int, mean: float, rng: np.random.Generator) -> pd.DataFrame:
    """Rewards of so many pictures a prompt; the first picture of the second prompt has none."""
    rows = [(f"uid{n}", prompt, index) for n, prompt in enumerate(prompts) for index in range(samples)]
    table = pd.DataFrame(rows, columns=["uid", "prompt", "sample_index"])
    rewards = np.clip(mean + rng.normal(0, 0.2, len(table)), 0, 1)
    rewards[samples] = np.nan
    guard = np.where(np.arange(len(table)) % 7 == 5, np.nan, -3.0)
    read = [prompt.split()[-1][:40] for prompt in table["prompt"]]
    return table.assign(
        reward=rewards, **{"reward/ocr": rewards, "reward/jpeg_compressibility": guard, "ocr/text": read}
    )


def pictures_of(prompts: list[str], size: tuple[int, int], mean: float, rng: np.random.Generator) -> np.ndarray:
    """Pictures [N, H, W, 3] with the prompts' last words on noise, which compress badly."""
    drawn = []
    for prompt in prompts:
        noise = rng.normal(120, 60 * (1.2 - mean), (size[1], size[0], 3)).clip(0, 255).astype(np.uint8)
        picture = Image.fromarray(noise)
        ImageDraw.Draw(picture).text((4, 4), prompt.split()[-1][:12], fill=(255, 255, 255))
        drawn.append(np.asarray(picture))
    return np.stack(drawn)


def in_memory(total: int, every: int, others: int = 0, size: tuple[int, int] = (48, 24)) -> Recorded:
    """A finished run that validated before it and every so often."""
    config, rng = config_of(total), np.random.default_rng(0)
    info = RunInfo("0" * 32, "1", "root", "FINISHED", 1_700_000_000_000, None, "active", run_name="quickstart-1")
    recorded = Recorded(Run(info, RunData()), config.model_dump(mode="json"), overrides={"trainer.seed": ["0", "1"]})
    apart = max(total // 100, 1)  # of a long run some iterations have one table: to make it takes as long as the page
    for step in range(1, total + 1):
        for name, value in metrics_of(step, total, rng, others).items():
            recorded.metrics.setdefault(name, {})[step] = value
        if step % apart == 1 or apart == 1:
            means = by_prompt(table_of(PROMPTS[:12], 4, level(step, total), rng))
        recorded.sampled[step] = means
    sheet = of_grid(grid(pictures_of(PROMPTS, size, 0.5, rng)))
    for step in range(0, total + 1, every):
        table = table_of(PROMPTS, 3, level(step, total), rng)
        recorded.held_out[step] = table.assign(**PLACEHOLDERS)
        recorded.metrics.setdefault("val/reward/mean", {})[step] = float(table["reward"].mean())
        recorded.grids.setdefault("validation", {})[step] = sheet
    shown = pictures_of([p for p in PROMPTS for _ in range(3)], size, 0.5, rng)
    found = extremes(validation_samples(table), lambda row: Image.fromarray(shown[row]))
    recorded.samples = {"held-out": (total, found), "training": (total, found)}
    return recorded


def in_mlflow(tracker: Tracker, total: int, every: int, prompts: list[str], size: tuple[int, int] = (48, 24)) -> None:
    """The record of such a run, as the training flow leaves it."""
    client, run_id, rng = tracker.client, tracker.run_id, np.random.default_rng(0)
    config = config_of(total)
    client.log_dict(run_id, config.model_dump(mode="json"), "config.json")
    client.log_dict(run_id, {"trainer.seed": ["0", "1"], "data.prompts": ["a", HOSTILE]}, "overrides.json")
    environment = {"python": "3.11.7", "packages": {"torch": "2.11.0"}, "hardware": HARDWARE}
    client.log_dict(run_id, environment, "lineage/000000/environment.json")
    tags = {"mlflow.source.git.commit": "c0ffee", "doubleflow.config_digest": "12345678", "reward.ocr": "1"}
    tags |= {"doubleflow.git_dirty": "false", "doubleflow.reward_hacking": "the reward rises while taste falls"}
    client.log_batch(run_id, params=[Param("trainer.seed", "1")], tags=[RunTag(*tag) for tag in tags.items()])
    for step in range(total + 1):
        metrics = metrics_of(step, total, rng) if step else {}
        sheets, tables, albums = {}, {}, {}
        if step % every == 0:
            table = table_of(prompts, 3, level(step, total), rng)
            shown = pictures_of([p for p in prompts for _ in range(3)], size, level(step, total), rng)
            found = extremes(validation_samples(table), lambda row, shown=shown: Image.fromarray(shown[row]))
            client.log_dict(run_id, as_json(step, found), f"extremes/{step:06d}.json")
            sheets, tables = {"validation": grid(shown[::3][:48])}, {"validation": table}
            metrics["val/reward/mean"] = float(table["reward"].mean())
        if step:
            table = table_of(prompts[:12], 16, level(step, total), rng)
            albums = {"pictures": list(pictures_of(list(table["prompt"][:8]), size, level(step, total), rng))}
            paths = [f"pictures/{step:06d}/{n:04d}.png" if n < 8 else None for n in range(len(table))]
            tables["samples"] = table.assign(
                advantage=0.0, seed=1, iteration=step, policy_version=step - 1, image=paths
            )
            sheets["samples"] = grid(np.stack(albums["pictures"]))
        tracker.log_step(step, metrics, sheets, tables, albums)
    client.set_terminated(run_id, "FINISHED")


HARDWARE = {"machine": "Linux", "cpus": 2, "memory_gib": 8.0}
