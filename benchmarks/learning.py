# SPDX-License-Identifier: Apache-2.0
"""Does every algorithm learn? Each from the quickstart's base model, three seeds, a few minutes on two cores a run.

    python -m benchmarks.learning [--algorithms flow_grpo dpo ...] [--seeds 0 1 2] [--jobs N]

Writes docs/learning.md (a table) and docs/learning.png (held-out reward against pictures seen and against seconds).
A run that is finished is not made again; `runs/learning` keeps them. With --jobs N, that many runs at a time, each on
two cores of its own. Where a run fails the others go on, the page stays as it is, and the command exits with 1 and
names the run's log. Needs `dvc repro`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import matplotlib.pyplot as plt
import numpy as np
from mlflow import MlflowClient
from scipy.stats import ttest_1samp

from benchmarks.failures import NotMeasured, refuse_failed
from tasks.config.recipes import changed_recipe

DOCS, RUNS = Path("docs"), Path("runs/learning")
CORES = 2
SIGNIFICANT = 0.05
TEACHER = "flow_grpo"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COMMON = [
    "trainer.total_training_steps=24",
    "trainer.test_freq=4",
    "trainer.save_freq=24",
    f"ray_init.num_cpus={CORES}",  # Ray counts the machine's cores, not those that a run is pinned to
]
OF_QUICKSTART = [
    f"{ROLLOUT}.algo={{sde_type: sde, noise_level: 0.7, sde_window_range: [0, 4]}}",
    f"{ACTOR}.diffusion_loss.clip_ratio=1.0e-3",
]
"""The recipe's kernel, window and clip range, which another algorithm's name would otherwise bring itself."""
FORWARD = ["algorithm.num_train_timesteps=4"]
SETTINGS: dict[str, list[str]] = {
    "flow_grpo": [],
    "dance_grpo": [f"{ROLLOUT}.algo.sde_type=dance_sde", f"{ROLLOUT}.algo.noise_level=0.7", f"{ACTOR}.optim.lr=2.0e-4"],
    "cps": ["algorithm.name=flow_grpo", f"{ROLLOUT}.algo.sde_type=cps", f"{ROLLOUT}.algo.noise_level=0.7"],
    "mix_grpo": [
        f"{ROLLOUT}.algo.sde_window_size=2",
        f"{ROLLOUT}.algo.sde_window_range=[0,5]",
        "trainer.total_training_steps=48",  # two trained steps an iteration, where flow_grpo has four
    ],
    "grpo_guard": [f"{ACTOR}.diffusion_loss.clip_ratio=1.0e-4"],
    "flow_dppo": [],
    "dpo": FORWARD,
    "dpo_offline": ["algorithm.name=dpo", "algorithm.sample_source=offline", *FORWARD],
    "diffusion_nft": [*FORWARD, "algorithm.old_policy_decay_schedule=copy"],
    "awm": [*FORWARD, f"{ACTOR}.diffusion_loss.clip_ratio=1.0"],
    "distill_kl": [],
    "distill_fm_mse": FORWARD,
}
"""What an algorithm changes in the recipe `flow-grpo` beside `algorithm.name`. All keep its kernel, window and clip
range, so that they are compared at equal ones; an algorithm that is about those gives its own."""


@dataclass(frozen=True)
class Curve:
    """One run: held-out reward after so many pictures and seconds of training, validation not counted."""

    algorithm: str
    seed: int
    images: list[float]
    seconds: list[float]
    reward: list[float]

    @property
    def gain(self) -> float:
        """Held-out reward at the end minus before training."""
        return self.reward[-1] - self.reward[0]


class Runner:
    """Makes one run after another on its own cores, with servers and stores of its own."""

    def __init__(self, slots: int):
        self.slots: Queue[int] = Queue()
        for slot in range(slots):
            self.slots.put(slot)
        self.pinned = slots > 1

    def curve(self, algorithm: str, seed: int) -> Curve:
        """Train and measure, or read the curve of a run that was made before; NotMeasured where a command fails."""
        folder = RUNS / f"{algorithm}-{seed}"
        record = folder / "curve.json"
        if record.is_file():
            return Curve(**json.loads(record.read_text()))
        folder.mkdir(parents=True, exist_ok=True)
        slot = self.slots.get()
        try:
            measured = (self._offline if "offline" in algorithm else self._online)(folder, slot, algorithm, seed)
        finally:
            self.slots.put(slot)
        curve = Curve(algorithm, seed, *measured)
        record.write_text(json.dumps(asdict(curve), indent=1))
        print(f"{algorithm:16} seed {seed}  {curve.reward[0]:.3f} -> {curve.reward[-1]:.3f}  {curve.seconds[-1]:.0f} s")
        return curve

    def _online(self, folder: Path, slot: int, algorithm: str, seed: int) -> tuple[list[float], ...]:
        """The run's own validations."""
        settings = changes(algorithm, seed, folder)
        self._python(folder, slot, "flows.train", settings)
        histories = Histories(folder)
        reward = histories.of("train", "val/reward/mean")
        spent = histories.training_seconds()
        images = histories.of("train", "perf/total_num_images")
        seen = [sum(value for step, value in images.items() if step <= at) for at in reward]
        return seen, [sum(value for step, value in spent.items() if step <= at) for at in reward], [*reward.values()]

    def _offline(self, folder: Path, slot: int, algorithm: str, seed: int) -> tuple[list[float], ...]:
        """Nothing is sampled in the run: the validation flow measures the exported weights, half way and at the end."""
        settings = changes(algorithm, seed, folder)
        config = changed_recipe("flow-grpo", settings)
        total = config.trainer.total_training_steps
        online = [*settings, "algorithm.sample_source=online"]
        self._python(folder, slot, "flows.validate", online)
        for steps in (total // 2, total):
            self._python(folder, slot, "flows.train", [*settings, f"trainer.total_training_steps={steps}"])
            self._python(folder, slot, "flows.validate", online, "--weights", str(config.run_dir / "weights"))
        histories = Histories(folder)
        spent, images = histories.training_seconds(), histories.of("train", "perf/total_num_images")
        points = [0, total // 2, total]
        return (
            [sum(value for step, value in images.items() if step <= at) for at in points],
            [sum(value for step, value in spent.items() if step <= at) for at in points],
            histories.validations(),
        )

    def _python(self, folder: Path, slot: int, module: str, settings: Iterable[str], *arguments: str) -> None:
        pin = ["taskset", "-c", f"{slot * CORES}-{slot * CORES + CORES - 1}"] if self.pinned else []
        given = [part for setting in settings for part in ("--set", setting)]
        environment = os.environ | {
            "PREFECT_HOME": str((folder / "prefect").resolve()),
            "MLFLOW_TRACKING_URI": f"sqlite:///{(folder / 'mlflow.db').resolve()}",
            "PREFECT_LOGGING_LEVEL": "WARNING",
            "OMP_WAIT_POLICY": "passive",
        }
        with (folder / "log.txt").open("a") as log:
            command = [*pin, sys.executable, "-m", module, "flow-grpo", *given, *arguments]
            code = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
        if code:
            raise NotMeasured(f"{folder.name}: {module} failed with exit code {code}, see {folder / 'log.txt'}")


def changes(algorithm: str, seed: int, folder: Path) -> list[str]:
    """All changes to the recipe `flow-grpo` that make this run; NotMeasured where its teacher has no weights yet."""
    teacher = []
    if algorithm.startswith("distill"):
        exported = sorted((RUNS / f"{TEACHER}-0").glob("train-*/weights"))
        if not exported:
            raise NotMeasured(f"{folder.name}: not begun, as {RUNS / f'{TEACHER}-0'} has no exported weights")
        (weights,) = exported
        teacher = [f"{ACTOR}.teacher_path={weights}"]
    return [
        *COMMON,
        f"algorithm.name={algorithm}",
        *OF_QUICKSTART,
        *teacher,
        *SETTINGS[algorithm],
        f"trainer.seed={seed}",
        "trainer.experiment_name=train",
        f"trainer.default_local_dir={folder}",
    ]


class Histories:
    """What the runs in a folder logged."""

    def __init__(self, folder: Path):
        self.client = MlflowClient(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        self.runs = self.client.search_runs(
            [experiment.experiment_id for experiment in self.client.search_experiments()],
            order_by=["attributes.start_time ASC"],
        )

    def of(self, prefix: str, metric: str) -> dict[int, float]:
        """Step -> value, of the one run whose name begins so."""
        (run,) = (run for run in self.runs if run.info.run_name.startswith(prefix))
        found = {item.step: item.value for item in self.client.get_metric_history(run.info.run_id, metric)}
        return dict(sorted(found.items()))

    def training_seconds(self) -> dict[int, float]:
        """Seconds of each iteration, without validation."""
        testing = self.of("train", "timing_s/testing")
        return {step: value - testing.get(step, 0.0) for step, value in self.of("train", "timing_s/step").items()}

    def validations(self) -> list[float]:
        """Rewards of the validation runs, in the order they were made."""
        names = [run for run in self.runs if run.info.run_name.startswith("validate")]
        return [run.data.metrics["val/reward/mean"] for run in names]


def plot(curves: dict[str, list[Curve]], path: Path) -> None:
    """Mean over the seeds with the range between them, one colour an algorithm."""
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True, layout="constrained")
    colours = plt.colormaps["tab20"].colors
    for number, (algorithm, seeds) in enumerate(curves.items()):
        rewards = np.array([curve.reward for curve in seeds])
        for axes, name in zip(panels, ("images", "seconds"), strict=True):
            along = np.mean([getattr(curve, name) for curve in seeds], axis=0)
            axes.plot(along, rewards.mean(0), "o-", color=colours[number], markersize=3, label=algorithm)
            axes.fill_between(along, rewards.min(0), rewards.max(0), color=colours[number], alpha=0.12, linewidth=0)
            axes.set_xlabel({"images": "pictures trained on", "seconds": "seconds of training on two cores"}[name])
            axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out OCR reward")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=110)


def table(curves: dict[str, list[Curve]]) -> str:
    """A row an algorithm, in Markdown."""
    lines = [
        "| Algorithm | Held-out reward before | after, each seed | Gain | p (gain > 0) | Pictures | Seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for algorithm, seeds in curves.items():
        gains = [curve.gain for curve in seeds]
        after = ", ".join(f"{curve.reward[-1]:.3f}" for curve in seeds)
        seconds = np.mean([curve.seconds[-1] for curve in seeds])
        lines.append(
            f"| `{algorithm}` | {np.mean([curve.reward[0] for curve in seeds]):.3f} | {after} | "
            f"{np.mean(gains):+.3f} | {p_value(gains):.4f} | {seeds[0].images[-1]:.0f} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def p_value(gains: list[float]) -> float:
    """One-sided t-test over the seeds: how likely is such a gain if nothing is learnt?"""
    return float(ttest_1samp(gains, 0.0, alternative="greater").pvalue) if len(gains) > 1 else float("nan")


PAGE = """# Every algorithm learns

`python -m benchmarks.learning` trains each algorithm from the quickstart's base model for {steps} iterations, with
{seeds} seeds, on two cores a run, and measures the OCR reward on 48 held-out numbers, 3 pictures each. The p-value is
that of a one-sided t-test of the gain over the seeds; {verdict}.

![held-out reward against pictures and seconds](learning.png)

{table}

{notes}
Machine: {machine}.
"""
NOTES = """`dpo_offline` trains on the 200 pairs of `data/pairs`, without a rollout; the two distillations learn from
`flow_grpo`'s weights after its run with seed 0, not from a reward. `mix_grpo` has twice as many iterations, of two
trained steps where `flow_grpo` has four. `cps` is `flow_grpo` with that kernel. What an algorithm changes in
`flow-grpo` stands in `benchmarks/learning.py`. These are budgets of two minutes and not what an algorithm can reach.
The recipe `quickstart` takes other settings for `diffusion_nft` (`nft_beta` .3, three optimiser steps an iteration, a
learning rate of 3e-4) and reads .98, .96 and .97 after 16 iterations. With the settings of this table, 120 iterations
read .912 after 30, .951 after 40, .998 after 70 and 1.000 from 100 on (one seed).
"""


def main() -> None:
    """Train, plot, write; fails if a run has failed or an algorithm has not learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on two cores of its own")
    parser.add_argument("--machine", default="2 CPU cores", help="named on the page")
    arguments = parser.parse_args()
    runner, curves, not_made = Runner(arguments.jobs), dict[str, list[Curve]](), list[str]()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for late in (False, True):  # students after their teacher
            names = [name for name in arguments.algorithms if name.startswith("distill") == late]
            made = {name: [pool.submit(runner.curve, name, seed) for seed in arguments.seeds] for name in names}
            for name, future in ((name, future) for name, futures in made.items() for future in futures):
                try:
                    curve = future.result()
                except NotMeasured as error:
                    not_made.append(str(error))
                else:
                    curves.setdefault(name, []).append(curve)
    if not_made:
        print(table(curves))
        refuse_failed([*not_made, f"{DOCS / 'learning.md'} stays as it is"])
    failed = [name for name, seeds in curves.items() if not p_value([curve.gain for curve in seeds]) < SIGNIFICANT]
    steps = COMMON[0].partition("=")[2]
    verdict = f"not below {SIGNIFICANT}: {', '.join(failed)}" if failed else f"all are below {SIGNIFICANT}"
    plot(curves, DOCS / "learning.png")
    page = PAGE.format(
        steps=steps,
        seeds=len(arguments.seeds),
        verdict=verdict,
        table=table(curves),
        notes=NOTES,
        machine=arguments.machine,
    )
    (DOCS / "learning.md").write_text(page)
    print(table(curves))
    if failed:
        sys.exit(f"no significant gain: {', '.join(failed)}")


if __name__ == "__main__":
    main()
