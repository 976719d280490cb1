# SPDX-License-Identifier: Apache-2.0
"""The learning curve of the README: the quickstart with several seeds, its table and its plot.

    python -m benchmarks.quickstart [--seeds 0 1 2]

A seed that is trained already is not trained again. Writes docs/quickstart_curve.png and
docs/quickstart_before_after.png, and prints a table: held-out reward by iteration, seconds a stage.
"""

import argparse
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
from mlflow import MlflowClient
from mlflow.entities import Run

from benchmarks.trained_runs import train
from tasks.config.recipes import load_recipe

DOCS = Path("docs")
STAGES = ("gen", "reward", "adv", "update_actor", "update_weights", "save_checkpoint", "wait_for_writes", "step")


def train_seed(seed: int) -> Run:
    """Train one seed, and find its MLflow run."""
    config, _, run = train("quickstart", [f"trainer.seed={seed}"])
    if seed == 0:
        shutil.copy(config.run_dir / "before_after.png", DOCS / "quickstart_before_after.png")
    return run


def history(run: Run, name: str) -> dict[int, float]:
    """Step -> value."""
    client = MlflowClient(load_recipe("quickstart").tracking.uri)
    return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}


def plot(runs: dict[int, Run], path: Path) -> None:
    """Held-out reward and rollout reward against iterations, one colour a seed."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    for number, (seed, run) in enumerate(runs.items()):
        colour = f"C{number}"
        rollout, held_out = history(run, "critic/rewards/mean"), history(run, "val/reward/mean")
        axes.plot(list(rollout), list(rollout.values()), color=colour, alpha=0.3, linewidth=1)
        axes.plot(list(held_out), list(held_out.values()), "o-", color=colour, label=f"seed {seed}")
    axes.set(xlabel="iteration (192 pictures each)", ylabel="OCR reward", ylim=(0.4, 1.0))
    axes.grid(alpha=0.3)
    axes.legend(title="held-out (thin: rollout)", loc="lower right")
    figure.savefig(path, dpi=120)


def table(runs: dict[int, Run]) -> str:
    """Held-out reward and mean seconds of each stage, a row a seed."""
    lines = []
    for seed, run in runs.items():
        held_out = "  ".join(f"{step}:{value:.3f}" for step, value in history(run, "val/reward/mean").items())
        seconds = {stage: list(history(run, f"timing_s/{stage}").values()) for stage in STAGES}
        means = "  ".join(f"{stage} {sum(v) / len(v):.3f}" for stage, v in seconds.items() if v)
        shares = list(history(run, "perf/orchestration_share").values())
        lines.append(f"seed {seed}  held-out  {held_out}")
        lines.append(f"        seconds an iteration  {means}  orchestration {sum(shares) / len(shares):.1%}")
    return "\n".join(lines)


def main() -> None:
    """Train, plot, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    runs = {seed: train_seed(seed) for seed in parser.parse_args().seeds}
    plot(runs, DOCS / "quickstart_curve.png")
    print(table(runs))


if __name__ == "__main__":
    main()
