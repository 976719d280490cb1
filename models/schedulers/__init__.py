"""Sigma schedules and reverse-process kernels."""

from models.schedulers.flow_match_sde import (
    FlowMatchSDEDiscreteScheduler,
    FlowMatchSDEDiscreteSchedulerOutput,
)
from models.schedulers.kernels import KERNELS, ReverseStep, check_kernel, register_kernel
from models.schedulers.leftover import leftover_noise
from models.schedulers.noise_keys import NoiseKey, generators
from models.schedulers.windows import window_steps

__all__ = [
    "KERNELS",
    "FlowMatchSDEDiscreteScheduler",
    "FlowMatchSDEDiscreteSchedulerOutput",
    "NoiseKey",
    "ReverseStep",
    "check_kernel",
    "generators",
    "leftover_noise",
    "register_kernel",
    "window_steps",
]
