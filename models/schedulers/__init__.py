"""Sigma schedules and reverse-process kernels."""

from models.schedulers.flow_match_sde import (
    FlowMatchSDEDiscreteScheduler,
    FlowMatchSDEDiscreteSchedulerOutput,
)
from models.schedulers.kernels import KERNELS, ReverseStep
from models.schedulers.leftover import leftover_noise
from models.schedulers.noise_keys import NoiseKey, generators
from models.schedulers.windows import window_steps

__all__ = [
    "KERNELS",
    "FlowMatchSDEDiscreteScheduler",
    "FlowMatchSDEDiscreteSchedulerOutput",
    "NoiseKey",
    "ReverseStep",
    "generators",
    "leftover_noise",
    "window_steps",
]
