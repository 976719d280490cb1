# SPDX-License-Identifier: Apache-2.0
"""What DiffusionNFT does to what its reward does not see: on points in 16 dimensions, on one CPU core, in minutes.

    python -m benchmarks.nft_drift [--seeds 0 1 2] [--goals 0.8 0.9] [--iterations 240] [--write]

A perceptron learns by flow matching to draw points around the mean of each of 32 prompts. The reward is 1 where the
first half of a point's dimensions is at a place of its prompt's, and sees nothing of the other half, whose distribution
should stay as it was. Each setting trains by the project's own loss and advantages. Told when the mean reward has first
reached a goal: the iteration, the distance of the velocity to that before training, and how far the unseen dimensions
are from their prompt's mean, 1 before training. `--write` puts the table into docs/algorithms.md. Nothing needs to be
prepared.
"""

import argparse
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.docs import put_table
from models.algorithms import DiffusionNFTLoss
from models.algorithms.losses import velocity_distance
from models.config.actor import DiffusionActorConfig, DiffusionLossConfig
from models.training.noised import add_noise
from tasks.config.algorithm import DiffusionAlgoConfig
from tasks.stages.advantage import compute_advantage

PAGE, SCRIPT = Path("docs/algorithms.md"), "nft_drift.py"
DIMENSIONS, SEEN, PROMPTS, WIDTH, SPREAD = 16, 8, 32, 192, 0.7
GROUPS, GROUP, MINI_BATCHES, LEVELS, STEPS = 64, 16, 4, 4, 10
REWARD_WIDTH, LEARNING_RATE = 0.5, 3e-4
EVERY = 5
"""Iterations between two looks."""


@dataclass(frozen=True)
class Setting:
    """What is varied: fields of a config by their names there."""

    nft_beta: float = 0.3
    adv_mode: str = "continuous"
    old_policy_decay: float = 0.0
    kl_loss_coef: float = 0.0
    matching_loss_coef: float = 0.0
    lr: float = LEARNING_RATE

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != getattr(Setting, name)}
        return ", ".join(f"`{name}` {value}" for name, value in changed.items()) or "`nft_beta` 0.3"


SETTINGS = (
    Setting(nft_beta=0.1),
    Setting(),
    Setting(nft_beta=1.0),
    Setting(old_policy_decay=0.5),
    Setting(old_policy_decay=0.9),
    Setting(kl_loss_coef=0.05),
    Setting(adv_mode="positive_only"),
    Setting(matching_loss_coef=0.25),
    Setting(matching_loss_coef=0.5),
    Setting(matching_loss_coef=1.0),
    Setting(matching_loss_coef=2.0),
    Setting(matching_loss_coef=0.5, nft_beta=1.0),
    Setting(lr=1e-3),
    Setting(nft_beta=0.1, old_policy_decay=0.8, lr=1e-3),
    Setting(nft_beta=0.1, old_policy_decay=0.8, lr=3e-3),
    Setting(nft_beta=0.1, old_policy_decay=0.9, lr=3e-3),
)


@dataclass(frozen=True)
class Look:
    """A look at a policy: its mean reward, and what the module's text names."""

    iteration: int
    reward: float
    distance: float
    unseen: float


class Task:
    """Prompts with their means and places, and a model that draws around the means."""

    def __init__(self, seed: int, steps: int = 1500):
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        sizes = (DIMENSIONS + PROMPTS + 3, WIDTH, WIDTH, WIDTH)
        hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.SiLU())]
        self.start = nn.Sequential(*hidden, nn.Linear(WIDTH, DIMENSIONS))
        self.means = 1.5 * self.normal(PROMPTS)
        self.places = (self.means + 0.55 * self.normal(PROMPTS))[:, :SEEN]
        optimizer = torch.optim.Adam(self.start.parameters(), 2e-3)
        for _ in range(steps):
            prompts = torch.randint(PROMPTS, (512,), generator=self.generator)
            clean, noise = self.means[prompts] + SPREAD * self.normal(512), self.normal(512)
            t = torch.rand(512, generator=self.generator)
            now = velocity(self.start, add_noise(clean, noise, t), t, prompts)
            step(optimizer, velocity_distance(now, noise - clean))

    def normal(self, count: int) -> Tensor:
        """[count, DIMENSIONS]."""
        return torch.randn(count, DIMENSIONS, generator=self.generator)

    @torch.no_grad()
    def sample(self, model: nn.Module, prompts: Tensor) -> Tensor:
        """[B, DIMENSIONS], by Euler steps."""
        x, times = self.normal(len(prompts)), torch.linspace(1, 0, STEPS + 1)
        for t, after in pairwise(times):
            x = x + (after - t) * velocity(model, x, t.expand(len(x)), prompts)
        return x

    def reward(self, points: Tensor, prompts: Tensor) -> Tensor:
        """[B], from 0 to 1."""
        off = points[:, :SEEN] - self.places[prompts]
        return torch.exp(-off.pow(2).mean(1) / REWARD_WIDTH)

    def unseen(self, points: Tensor, prompts: Tensor) -> float:
        """How far the unseen dimensions are from their prompt's mean, root mean square; `SPREAD` in the data."""
        return (points - self.means[prompts])[:, SEEN:].pow(2).mean().sqrt().item()


def velocity(model: nn.Module, points: Tensor, t: Tensor, prompts: Tensor) -> Tensor:
    """[B, DIMENSIONS] at the levels t [B]."""
    named = 2 * functional.one_hot(prompts, PROMPTS).float()
    return model(torch.cat([points, named, torch.stack([t, (3 * t).sin(), (3 * t).cos()], 1)], 1))


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One optimiser step, its gradient clipped to a norm of 1."""
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer.step()


def train(task: Task, setting: Setting, iterations: int, goal: float, seed: int) -> list[Look]:
    """Looks at a policy that trains until it has reached the goal."""
    task.generator.manual_seed(seed)
    policy, old = deepcopy(task.start), deepcopy(task.start)
    optimizer = torch.optim.Adam(policy.parameters(), setting.lr, betas=(0.9, 0.99))
    loss, kl = DiffusionLossConfig(nft_beta=setting.nft_beta), setting.kl_loss_coef
    actor = DiffusionActorConfig(
        diffusion_loss=loss, use_kl_loss=kl > 0, kl_loss_coef=kl, matching_loss_coef=setting.matching_loss_coef
    )
    algorithm, uids = DiffusionAlgoConfig(adv_mode=setting.adv_mode), np.arange(GROUPS).repeat(GROUP)
    seen: list[Look] = []
    for iteration in range(iterations + 1):
        prompts = torch.randint(PROMPTS, (GROUPS,), generator=task.generator).repeat_interleave(GROUP)
        points = task.sample(old, prompts)
        if iteration % EVERY == 0:
            seen.append(look(task, policy, iteration))
            if seen[-1].reward >= goal:
                break
        data = {"sample_level_rewards": task.reward(points, prompts).numpy(), "uid": uids}
        found = compute_advantage(data, "flow_grpo", global_std=False, config=algorithm)
        advantages = torch.from_numpy(found["advantages"])
        for rows in torch.randperm(GROUPS, generator=task.generator).view(MINI_BATCHES, -1):
            index = (GROUP * rows[:, None] + torch.arange(GROUP)).flatten().repeat(LEVELS)
            step(optimizer, loss_of(task, actor, policy, old, points[index], prompts[index], advantages[index]))
        for moved, new in zip(old.parameters(), policy.parameters(), strict=True):
            moved.data.lerp_(new.data, 1 - setting.old_policy_decay)
    return seen


def loss_of(
    task: Task,
    config: DiffusionActorConfig,
    policy: nn.Module,
    old: nn.Module,
    points: Tensor,
    prompts: Tensor,
    advantages: Tensor,
) -> Tensor:
    """The project's loss at levels of these samples' own, the distance to the start and the flow-matching error."""
    t, noise = torch.rand(len(points), generator=task.generator), task.normal(len(points))
    noisy = add_noise(points, noise, t)
    now = velocity(policy, noisy, t, prompts)
    with torch.no_grad():
        before = velocity(old, noisy, t, prompts)
    given = {"clean_latents": points, "noisy_latents": noisy, "sigmas": t, "advantages": advantages}
    loss, _ = DiffusionNFTLoss.compute_loss(velocity=now, old_velocity=before, config=config, **given)
    loss = loss + config.matching_loss_coef * velocity_distance(now, noise - points)
    if config.use_kl_loss:
        with torch.no_grad():
            start = velocity(task.start, noisy, t, prompts)
        loss = loss + config.kl_loss_coef * velocity_distance(now, start)
    return loss


@torch.no_grad()
def look(task: Task, policy: nn.Module, iteration: int) -> Look:
    """By samples of its own, which draw from no generator of the training."""
    state = task.generator.get_state()
    prompts = torch.arange(PROMPTS).repeat_interleave(64)
    points = task.sample(policy, prompts)
    t = torch.rand(len(points), generator=task.generator)
    noisy = add_noise(points, task.normal(len(points)), t)
    task.generator.set_state(state)
    apart = velocity_distance(velocity(policy, noisy, t, prompts), velocity(task.start, noisy, t, prompts)).item()
    return Look(iteration, task.reward(points, prompts).mean().item(), apart, task.unseen(points, prompts))


def table(runs: Mapping[Setting, Sequence[Sequence[Look]]], goals: Sequence[float]) -> str:
    """A row a setting: means over the seeds, where all of them reached the goal."""
    lines = [f"| Setting | {' | '.join(f'Iterations to {goal} | distance | unseen' for goal in goals)} |"]
    lines.append("|---" * (1 + 3 * len(goals)) + "|")
    for setting, seeds in runs.items():
        cells = [str(setting)]
        for goal in goals:
            first = [next((one for one in run if one.reward >= goal), None) for run in seeds]
            reached = [one for one in first if one is not None]
            if len(reached) < len(first):
                cells += ["not reached", "", ""]
                continue
            off = mean(one.unseen / run[0].unseen for one, run in zip(reached, seeds, strict=True))
            cells += [f"{mean(one.iteration for one in reached):.0f}"]
            cells += [f"{mean(one.distance for one in reached):.2f}", f"{off:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goals", type=float, nargs="+", default=[0.8, 0.9])
    parser.add_argument("--iterations", type=int, default=240, help="at most")
    parser.add_argument("--write", action="store_true", help="put the table into docs/algorithms.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[Setting, list[list[Look]]] = {setting: [] for setting in SETTINGS}
    for seed in given.seeds:
        task = Task(seed)
        for setting, found in runs.items():
            found.append(train(task, setting, given.iterations, max(given.goals), seed))
            print(f"seed {seed}, {setting}: {found[-1][-1]}", flush=True)
    print(table(runs, given.goals))
    if given.write:
        put_table(PAGE, SCRIPT, table(runs, given.goals))


if __name__ == "__main__":
    main()
