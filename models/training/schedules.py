# SPDX-License-Identifier: Apache-2.0
"""The learning rate's schedule: a warm-up to a constant rate, or one of transformers' by its name."""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from models.registry import check_options

if TYPE_CHECKING:
    from models.config.actor import OptimConfig

GIVEN = frozenset({"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"})
"""Arguments of transformers' schedules that the config has fields for, or the run fills in."""
PROBES = 1000
"""Steps at which a schedule is looked at before a run."""
ENDS_A_STEP_BEFORE = ("cosine_warmup_with_min_lr",)
"""It counts the first step after the warm-up as one, so it rises again at the step where the others end."""
NOTHING = 1e-9
"""Share of `optim.lr` up to which a rate trains nothing: 0 up to the rounding of a cosine."""


def build_lr_scheduler(optimizer: Optimizer, settings: "OptimConfig") -> LRScheduler:
    """The schedule that `optim` asks for, at its first step; one `step()` of it after each optimiser step.

    After the steps that it spans it keeps its last rate. transformers' own go on as their formulas do: a cosine rises
    to the peak again.

    Args:
        settings: with `total_training_steps` filled in, where the schedule depends on it.
    """
    if settings.lr_scheduler_type is None:
        warmup = max(settings.lr_warmup_steps, 1)
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    from transformers.optimization import get_scheduler  # here: a flow's start needs none of it

    stable = "num_stable_steps" in settings.lr_scheduler_kwargs  # transformers warns of both
    scheduler = get_scheduler(
        settings.lr_scheduler_type,
        optimizer,
        num_warmup_steps=settings.lr_warmup_steps,
        num_training_steps=None if stable else settings.total_training_steps,
        scheduler_specific_kwargs=dict(settings.lr_scheduler_kwargs),
    )
    if settings.depends_on_length and settings.total_training_steps is not None:
        # A partial, as transformers' own are: a checkpoint then holds of it what it held before.
        end = settings.total_training_steps - (settings.lr_scheduler_type in ENDS_A_STEP_BEFORE)
        scheduler.lr_lambdas = [functools.partial(_held, factor, end) for factor in scheduler.lr_lambdas]
    return scheduler


def _held(factor: Callable[[int], float], end: int, step: int) -> float:
    """The factor of the step, and from the end of the span on the one that it has there."""
    return factor(min(step, end))


def check_lr_schedule(settings: "OptimConfig") -> None:
    """The schedule takes its arguments, and what it gives over the run are learning rates.

    Args:
        settings: with `total_training_steps` filled in.

    Raises:
        ValueError: it does not; or a rate is negative or not finite, or none is above 0.
    """
    name, options = settings.lr_scheduler_type, settings.lr_scheduler_kwargs
    if name is None:
        return
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

    check_options(
        "actor.optim.lr_scheduler_kwargs", name, TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)], options, GIVEN
    )
    _check_parts(settings)
    try:
        rates = _rates(settings)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(
            f"actor.optim.lr_scheduler_kwargs are {options}, which {name} does not take: {error}"
        ) from error
    wrong = next((rate for rate in rates if not (math.isfinite(rate) and rate >= 0)), None)
    if wrong is not None or not any(rates):
        what = "0 at every step" if wrong is None else f"{wrong:g} at a step"
        raise ValueError(
            f"actor.optim.lr_scheduler_type {name} with lr {settings.lr:g} and lr_scheduler_kwargs {options} gives a "
            f"learning rate of {what}: rates are finite, not negative, and above 0 somewhere"
        )


def check_span(settings: "OptimConfig", planned: int) -> str | None:
    """A sentence where the run makes more optimiser steps than the schedule spans, else None.

    Args:
        settings: that `check_lr_schedule` has found right, with `total_training_steps` filled in.
        planned: optimiser steps of the whole run.

    Raises:
        ValueError: the steps that are more would be made at a learning rate of 0.
    """
    name, span, field = settings.lr_scheduler_type, settings.total_training_steps, "total_training_steps"
    if name == "warmup_stable_decay" and not settings.depends_on_length:
        parts = settings.lr_scheduler_kwargs
        span, field = (
            settings.lr_warmup_steps + parts["num_stable_steps"] + parts["num_decay_steps"],
            "num_stable_steps",
        )
    elif not settings.depends_on_length:
        return None
    if span is None or planned <= span:
        return None
    rate = settings.lr * _factor(settings)(span)
    what = f"actor.optim.{field} has {name} span {span} optimiser steps, but the run makes {planned}"
    right = f"let it span {planned}" + (", or leave total_training_steps out" if settings.depends_on_length else "")
    if rate <= NOTHING * settings.lr:
        raise ValueError(f"{what}, and those after the span would learn nothing, at a rate of 0: {right}")
    return f"{what}: those after the span keep its last learning rate, {rate:g} of {settings.lr:g}"


def _check_parts(settings: "OptimConfig") -> None:
    """Warm-up and decay fit into the steps that there are. Raises ValueError."""
    total, name = settings.total_training_steps, settings.lr_scheduler_type
    if not settings.depends_on_length or total is None:
        return
    decay = settings.lr_scheduler_kwargs.get("num_decay_steps", 0) if name == "warmup_stable_decay" else 1
    if settings.lr_warmup_steps + decay > total:
        raise ValueError(
            f"actor.optim.lr_warmup_steps {settings.lr_warmup_steps} and at least {decay} steps of {name} are more "
            f"than the {total} optimiser steps that it spans: let the warm-up be shorter, or give total_training_steps"
        )


def _rates(settings: "OptimConfig") -> list[float]:
    """Learning rates at up to `PROBES` of the steps that the schedule spans, the last one among them."""
    steps = settings.total_training_steps or PROBES
    factor = _factor(settings)
    return [settings.lr * factor(step) for step in {*range(0, steps, -(-steps // PROBES)), steps - 1}]


def _factor(settings: "OptimConfig") -> Callable[[int], float]:
    """Optimiser step -> what `lr` is multiplied by."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=settings.lr)
    return cast(LambdaLR, build_lr_scheduler(optimizer, settings)).lr_lambdas[0]
