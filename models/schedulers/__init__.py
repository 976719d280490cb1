# SPDX-License-Identifier: Apache-2.0
"""Sigma schedules and reverse-process kernels."""

from typing import TYPE_CHECKING, Any

from models.schedulers.gradient_scale import rectifying_weights
from models.schedulers.kernels import KERNELS, ReverseStep, check_kernel, register_kernel
from models.schedulers.leftover import leftover_noise, step_without_log_prob
from models.schedulers.noise_keys import NoiseKey, generators
from models.schedulers.windows import window_steps

if TYPE_CHECKING:
    from models.schedulers.flow_match_sde import FlowMatchSDEDiscreteScheduler, FlowMatchSDEDiscreteSchedulerOutput

__all__ = [
    "KERNELS",
    "FlowMatchSDEDiscreteScheduler",
    "FlowMatchSDEDiscreteSchedulerOutput",
    "NoiseKey",
    "ReverseStep",
    "check_kernel",
    "generators",
    "leftover_noise",
    "rectifying_weights",
    "register_kernel",
    "step_without_log_prob",
    "window_steps",
]


def __getattr__(name: str) -> Any:
    """The scheduler itself, when it is asked for: diffusers takes seconds to import, and the losses, which need only
    the kernels, are looked up before a run starts."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from models.schedulers import flow_match_sde

    return getattr(flow_match_sde, name)
