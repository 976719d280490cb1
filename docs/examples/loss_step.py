# SPDX-License-Identifier: Apache-2.0
"""One step of Flow-GRPO on a toy: sample, score, compare within the group, replay, update."""

import numpy as np
import torch

from models.algorithms import FlowGRPOLoss, compute_flow_grpo_outcome_advantage
from models.config.actor import DiffusionActorConfig
from models.schedulers import FlowMatchSDEDiscreteScheduler


def main() -> None:
    torch.manual_seed(0)
    policy = torch.nn.Linear(8, 8)  # velocity of a latent [B, 8]
    scheduler = FlowMatchSDEDiscreteScheduler()
    scheduler.set_timesteps(10)
    timestep, x = scheduler.timesteps[4], torch.randn(16, 8)

    with torch.no_grad():  # x' drawn from the old policy, with log p(x' | x), [B]
        drawn, old_log_prob, *_ = scheduler.sample_previous_step(
            x, policy(x), timestep=timestep, generator=torch.Generator().manual_seed(1)
        )
    rewards = -drawn.square().mean(1)  # [B]: small latents are good ones
    groups = np.array(["first prompt"] * 8 + ["second prompt"] * 8)
    advantages, _ = compute_flow_grpo_outcome_advantage(rewards, groups)

    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    for name in ("before", "after"):
        _, log_prob, *_ = scheduler.sample_previous_step(x, policy(x), timestep=timestep, prev_sample=drawn)
        loss, metrics = FlowGRPOLoss.compute_loss(
            old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, config=DiffusionActorConfig()
        )
        print(f"{name} loss {loss:.6f} ratio_deviation {metrics['ratio_deviation/mean']:.6f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
