# SPDX-License-Identifier: Apache-2.0
"""The stochastic reverse process that rollout and update share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from models.schedulers.kernels import ReverseStep, check_step, get_kernel
from models.schedulers.noise_keys import copy_without_waiting

Generators = torch.Generator | Sequence[torch.Generator] | None
CPU = torch.device("cpu")


@dataclass
class FlowMatchSDEDiscreteSchedulerOutput(BaseOutput):
    """One reverse step.

    Attributes:
        prev_sample: x', fp32, [B, ...]: the next model input.
        log_prob: log p(x' | x), mean over the latent, [B]; None for a deterministic step.
        prev_sample_mean: mean of x', [B, ...].
        std_dev_t: full standard deviation of x', [B, 1, ...].
    """

    prev_sample: Tensor
    log_prob: Tensor | None
    prev_sample_mean: Tensor
    std_dev_t: Tensor


class FlowMatchSDEDiscreteScheduler(FlowMatchEulerDiscreteScheduler):
    """diffusers' Euler scheduler (same schedule, same config file) with stochastic steps and their log-probs.

    The arithmetic is fp32 and the sample stays fp32 whatever the model's number format is: a latent rounded to
    bf16 would not replay its own log-prob.
    """

    _copied: tuple[Tensor, Tensor] | None = None
    """`sigmas`, and their copy on the device that last asked for them."""

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = float("inf"),
        s_noise: float = 1.0,
        generator: Generators = None,
        per_token_timesteps: Tensor | None = None,
        return_dict: bool = True,
        noise_level: float = 0.7,
        prev_sample: Tensor | None = None,
        sde_type: str = "sde",
        return_logprobs: bool = True,
        sde_options: Mapping[str, Any] | None = None,
    ) -> FlowMatchSDEDiscreteSchedulerOutput | tuple:
        """One sequential step of the denoising loop; advances the internal step index.

        Args:
            model_output: velocity, [B, ...].
            timestep: the loop's current timestep; sets the step index at the first call, as in diffusers.
            sample: x, [B, ...].
            s_churn, s_tmin, s_tmax, s_noise: part of diffusers' signature; the Euler scheduler ignores them too.
            generator: one generator, or one a sample.
            per_token_timesteps: not supported.
            return_dict: a `FlowMatchSDEDiscreteSchedulerOutput`, else the tuple of its fields.
            noise_level, prev_sample, sde_type, return_logprobs, sde_options: see `sample_previous_step`.

        Raises:
            ValueError: the timestep is a whole number, which may be a step's index.
        """
        if isinstance(timestep, int) or (isinstance(timestep, Tensor) and not timestep.is_floating_point()):
            raise ValueError(
                f"timestep is {timestep}, an integer: give an element of scheduler.timesteps, not the number of a step"
            )
        if self.step_index is None:
            self._init_step_index(timestep)
        output = self.sample_previous_step(
            sample,
            model_output,
            generator=generator,
            per_token_timesteps=per_token_timesteps,
            noise_level=noise_level,
            prev_sample=prev_sample,
            sde_type=sde_type,
            return_logprobs=return_logprobs,
            sde_options=sde_options,
        )
        self._step_index += 1
        return FlowMatchSDEDiscreteSchedulerOutput(*output) if return_dict else output

    def sample_previous_step(
        self,
        sample: Tensor,
        model_output: Tensor,
        timestep: Tensor | None = None,
        generator: Generators = None,
        per_token_timesteps: Tensor | None = None,
        noise_level: float = 0.7,
        prev_sample: Tensor | None = None,
        sde_type: str = "sde",
        return_logprobs: bool = True,
        return_sqrt_dt: bool = False,
        sde_options: Mapping[str, Any] | None = None,
    ) -> tuple:
        """Sample x' from x, or score a given x'.

        Args:
            sample: x, [B, ...].
            model_output: velocity, [B, ...], of any float format.
            timestep: [B] or a scalar, values of `self.timesteps`; None uses the sequential loop's step index.
            generator: one generator, or one a sample; needed unless `prev_sample` is given or the step is an ODE.
            per_token_timesteps: not supported.
            noise_level: a (sde, cps) or eta (dance_sde); 0 is the deterministic Euler step.
            prev_sample: x' to score; no gradient flows through it. None draws it.
            sde_type: name or import path of the kernel.
            return_logprobs: False leaves the log-prob None.
            return_sqrt_dt: also return sqrt(-D), [B].
            sde_options: keyword arguments of the kernel.

        Returns:
            (prev_sample, log_prob, prev_sample_mean, std_dev_t[, sqrt_dt]), all fp32; log_prob is None for an ODE
            step, std_dev_t is then 0.

        Raises:
            ValueError: unknown `sde_type`, or a timestep on the CPU that is not in the schedule. One on a GPU makes
                NaN of all that comes out of its step: `check_timesteps` says so beforehand.
            WrongAnswer: the kernel gave no ReverseStep, or one of other shapes.
            NotImplementedError: per_token_timesteps.
        """
        if per_token_timesteps is not None:
            raise NotImplementedError("per_token_timesteps is not supported by FlowMatchSDEDiscreteScheduler")
        kernel, log_density = get_kernel(sde_type)
        sample, velocity = sample.float(), model_output.float()
        sigma, sigma_next = self._sigmas_of(timestep, sample)
        output: tuple[Tensor, Tensor | None, Tensor, Tensor]
        if noise_level == 0:
            mean = sample + (sigma_next - sigma) * velocity
            drawn = mean if prev_sample is None else prev_sample.detach().float()
            output = (drawn, None, mean, torch.zeros_like(sigma))
        else:
            sigma_max = self._sigmas_on(sample.device)[1].expand_as(sigma)
            distribution = kernel(sample, velocity, sigma, sigma_next, sigma_max, noise_level, **(sde_options or {}))
            check_step(sde_type, distribution, sample)
            prev_sample = _drawn(distribution, generator) if prev_sample is None else prev_sample.detach().float()
            log_prob = log_density(prev_sample, distribution) if return_logprobs else None
            output = (prev_sample, log_prob, distribution.mean, distribution.std_dev_t)
        if not return_sqrt_dt:
            return output
        return (*output, torch.sqrt(sigma - sigma_next).flatten())

    def sqrt_dt(self, timesteps: Tensor) -> Tensor:
        """sqrt(-D) of the steps that begin at these timesteps [B], [B].

        Raises:
            ValueError: a timestep on the CPU that the schedule does not hold; on a GPU it makes NaN.
        """
        sigma, sigma_next = self._sigmas_of(timesteps, timesteps)
        return torch.sqrt(sigma - sigma_next)

    def _sigmas_of(self, timestep: Tensor | None, sample: Tensor) -> tuple[Tensor, Tensor]:
        """(sigma, sigma_next), each [B, 1, ...] on the sample's device."""
        batch = sample.shape[0]
        shape = (batch, *([1] * (sample.ndim - 1)))
        sigmas = self._sigmas_on(sample.device)
        if timestep is None:  # the loop's own number: an index on the CPU would wait for the GPU at each step
            step = self._begin_or_current_step()
            return sigmas[step].expand(shape).contiguous(), sigmas[step + 1].expand(shape).contiguous()
        given = torch.as_tensor(timestep).expand(batch)
        index, is_there = self.find_timesteps(given)
        # On a GPU a wrong timestep is not looked for, which would wait for all that was asked of it: it makes NaN.
        if given.device.type == "cpu":
            self._refuse_missing(given, is_there)
        index, is_there = index.to(sample.device), is_there.to(sample.device)

        def sigmas_at(place: Tensor) -> Tensor:
            return sigmas[place].masked_fill(~is_there, torch.nan).view(shape)

        return sigmas_at(index), sigmas_at(index + 1)

    def _sigmas_on(self, device: torch.device) -> Tensor:
        """`sigmas`, which diffusers keeps on the CPU, in fp32 on a device: copied once, as a copy waits for a GPU."""
        if self._copied is None or self._copied[0] is not self.sigmas or self._copied[1].device != device:
            self._copied = (self.sigmas, self.sigmas.to(device=device, dtype=torch.float32))
        return self._copied[1]

    def _begin_or_current_step(self) -> int:
        if self.step_index is not None:
            return self.step_index
        return self.begin_index or 0

    def check_timesteps(self, timesteps: Tensor) -> None:
        """Refuse timesteps, of any shape, that the schedule does not hold; waits for a GPU that has them.

        Raises:
            ValueError: one is not there.
        """
        given = timesteps.flatten()
        self._refuse_missing(given, self.find_timesteps(given)[1])

    def _refuse_missing(self, timesteps: Tensor, is_there: Tensor) -> None:
        if not bool(is_there.all()):
            missing = timesteps[~is_there][0].item()
            raise ValueError(f"timestep {missing} is not in this scheduler's schedule {self.timesteps.tolist()}")

    def find_timesteps(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """(position of each timestep [B] in the schedule, 0 where it has none; has it one?), [B] each, on the
        timesteps' device, and without waiting for it."""
        table = self.timesteps.to(timesteps.device)
        hit = timesteps.to(table.dtype)[:, None] == table[None, :]
        return hit.int().argmax(1), hit.any(1)


def _drawn(distribution: ReverseStep, generator: Generators) -> Tensor:
    mean = distribution.mean.detach()
    several = list(generator) if isinstance(generator, Sequence) else generator
    first = several[0] if isinstance(several, list) else several
    by_cpu = first is not None and first.device.type == "cpu"  # then randn_tensor draws there, too, and waits to copy
    noise = randn_tensor(mean.shape, generator=several, device=CPU if by_cpu else mean.device, dtype=mean.dtype)
    return mean + distribution.std_dev_t * copy_without_waiting(noise, mean.device)
