# SPDX-License-Identifier: Apache-2.0
"""A reverse-process kernel of one's own: the scheduler draws with it and scores with it."""

import torch

from models.schedulers import FlowMatchSDEDiscreteScheduler, ReverseStep, register_kernel


@register_kernel("fading")
def fading_step(sample, velocity, sigma, sigma_next, sigma_max, noise_level, *, power=1.0):
    """g = a s^power: noise that fades with the noise level; mu = x + v D + g^2/(2 s) e_hat D, sd = g sqrt(-D).

    `sample` and `velocity` are [B, ...], the sigmas [B, 1, ...], and D = sigma_next - sigma is below 0.
    """
    step, g = sigma_next - sigma, noise_level * sigma**power
    noise_hat = sample + (1 - sigma) * velocity
    mean = sample + velocity * step + g**2 / (2 * sigma) * noise_hat * step
    return ReverseStep(mean, g * torch.sqrt(-step))


def main() -> None:
    scheduler = FlowMatchSDEDiscreteScheduler()
    scheduler.set_timesteps(4)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(1)
    for timestep in scheduler.timesteps[:-1]:
        velocity = -x  # any prediction of e - x0
        x, log_prob, mean, std = scheduler.sample_previous_step(
            x, velocity, timestep=timestep, generator=noise, sde_type="fading", sde_options={"power": 0.5}
        )
        exact = torch.distributions.Normal(mean, std.expand_as(mean)).log_prob(x).mean((1, 2))
        print(f"sigma {timestep / 1000:.3f} sd {std[0].item():.4f} error {(log_prob - exact).abs().max():.1e}")


if __name__ == "__main__":
    main()
