# SPDX-License-Identifier: Apache-2.0
"""The learning rate's schedules: transformers' own step for step, through a resume, and what is refused of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler

from models.config.actor import SCHEDULES, SCHEDULES_BY_METRIC, SCHEDULES_OF_ALL_STEPS, OptimConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.training.fsdp import ActorBatch, DiffusersFSDPEngine
from models.training.schedules import build_lr_scheduler, check_lr_schedule, check_span
from tests.support.helpers import actor_config, model_config, rollout_request

TOTAL, WARMUP, LR = 12, 3, 1e-2
KWARGS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    "inverse_sqrt": {"timescale": 2},
    "cosine_with_min_lr": {"min_lr": 2e-3},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 5, "min_lr_ratio": 0.1, "decay_type": "linear"},
}


def settings_of(name: str | None, **changes: Any) -> OptimConfig:
    warmup = 0 if name == "constant" else WARMUP
    given = {
        "lr": LR,
        "lr_warmup_steps": warmup,
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": KWARGS.get(str(name), {}),
    }
    return OptimConfig(**given | changes).spanning(TOTAL)


def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.AdamW([weight], lr=LR)


def rates_of(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = TOTAL) -> list[float]:
    """Learning rates that the optimiser itself makes its steps with."""
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_transformers_schedule_of_that_name(name: str) -> None:
    settings, own, theirs = settings_of(name), optimizer(), optimizer()
    check_lr_schedule(settings)
    rates = rates_of(own, build_lr_scheduler(own, settings))
    # Its own function, called with what that name needs: not through the unified one, which is under test.
    needs = {"num_warmup_steps": settings.lr_warmup_steps, "num_training_steps": TOTAL}
    function = TYPE_TO_SCHEDULER_FUNCTION[name]
    taken = {key: value for key, value in needs.items() if key in function.__code__.co_varnames}
    assert rates == rates_of(theirs, function(theirs, **taken, **settings.lr_scheduler_kwargs))
    assert len(set(rates)) > (3 if name not in ("constant",) else 0)


def test_every_name_of_transformers_is_taken_or_refused_with_a_reason() -> None:
    assert {kind.value for kind in TYPE_TO_SCHEDULER_FUNCTION} == {*SCHEDULES, *SCHEDULES_BY_METRIC}


def test_without_a_name_the_rate_is_the_one_of_before() -> None:
    own = optimizer()
    rates = rates_of(own, build_lr_scheduler(own, settings_of(None)), 5)
    assert rates == [LR * min(1.0, (step + 1) / WARMUP) for step in range(5)]


def test_stable_steps_that_are_given_need_no_length_of_the_run() -> None:
    kwargs = STABLE
    settings = settings_of("warmup_stable_decay", lr_scheduler_kwargs=kwargs)
    own, theirs = optimizer(), optimizer()
    expected = get_scheduler("warmup_stable_decay", theirs, WARMUP, scheduler_specific_kwargs=dict(kwargs))
    assert rates_of(own, build_lr_scheduler(own, settings)) == rates_of(theirs, expected)
    assert settings_of("warmup_stable_decay", lr_scheduler_kwargs=kwargs).total_training_steps == TOTAL


STABLE = {"num_stable_steps": 2, "num_decay_steps": 3}
LAST_RATES = {"polynomial": 1e-4, "cosine_with_min_lr": 2e-3, "cosine_warmup_with_min_lr": 1e-3} | {
    "warmup_stable_decay": 1e-3
}
"""Of the schedules that do not end at 0."""


@pytest.mark.parametrize("name", SCHEDULES_OF_ALL_STEPS)
def test_the_rate_at_the_end_of_the_span_stays(name: str) -> None:
    own = optimizer()
    rates = rates_of(own, build_lr_scheduler(own, settings_of(name)), 3 * TOTAL)
    assert rates[TOTAL:] == pytest.approx([LAST_RATES.get(name, 0.0)] * 2 * TOTAL)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_within_the_span_has_nothing_to_tell(name: str) -> None:
    assert check_span(settings_of(name), TOTAL) is None


@pytest.mark.parametrize("name", SCHEDULES_OF_ALL_STEPS)
def test_a_run_longer_than_the_span_is_told_or_refused(name: str) -> None:
    """Refused where the steps that are more would change nothing."""
    told = f"actor.optim.total_training_steps has {name} span 12 optimiser steps, but the run makes 13"
    if name in LAST_RATES:
        found = check_span(settings_of(name), TOTAL + 1)
        assert found == f"{told}: those after the span keep its last learning rate, {LAST_RATES[name]:g} of 0.01"
        return
    with pytest.raises(ValueError, match=f"^{told}, .* learn nothing, at a rate of 0: let it span 13, or leave"):
        check_span(settings_of(name), TOTAL + 1)


def test_stable_steps_that_are_given_are_a_span() -> None:
    settings = settings_of("warmup_stable_decay", lr_scheduler_kwargs=STABLE)
    assert check_span(settings, WARMUP + 5) is None
    with pytest.raises(ValueError, match=r"num_stable_steps has warmup_stable_decay span 8 .*: let it span 9$"):
        check_span(settings, WARMUP + 6)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "cosine",
            {"lr_scheduler_kwargs": {"min_lr": 0}},
            "lr_scheduler_kwargs has min_lr, but cosine takes num_cycles$",
        ),
        ("constant", {"lr_scheduler_kwargs": {"power": 2}}, "has power, but constant takes no options"),
        ("warmup_stable_decay", {"lr_scheduler_kwargs": {}}, "lacks num_decay_steps, without which"),
        (
            "cosine_with_min_lr",
            {"lr_scheduler_kwargs": {}},
            r"which cosine_with_min_lr does not take: One of min_lr or",
        ),
        ("polynomial", {"lr_scheduler_kwargs": {"lr_end": 1.0}}, r"does not take: lr_end .1.0. must be smaller"),
        ("cosine", {"lr_scheduler_kwargs": {"num_cycles": "x"}}, "does not take"),
        ("polynomial", {"lr_scheduler_kwargs": {"lr_end": -5e-3}}, r"a learning rate of -0\.\d+ at a step"),
        (
            "linear",
            {"lr_warmup_steps": TOTAL},
            "lr_warmup_steps 12 and at least 1 steps of linear are more than the 12",
        ),
        (
            "warmup_stable_decay",
            {"lr_scheduler_kwargs": {"num_decay_steps": 10}},
            "lr_warmup_steps 3 and at least 10 steps of warmup_stable_decay are more than the 12 optimiser steps",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_a_run(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_lr_schedule(settings_of(name, **changes))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["cosine", "warmup_stable_decay"])
def test_a_resumed_trainer_has_the_schedules_next_rate(one_block_model: Path, name: str, tmp_path: Path) -> None:
    config = model_config(one_block_model)
    _, trajectories = DiffusersRolloutEngine(config).generate(rollout_request(samples=2, lengths=(5, 3)))
    assert trajectories is not None
    batch = ActorBatch([(trajectories, torch.tensor([1.0, -0.8, 0.3, -1.5]))], 4)
    settings = actor_config().model_copy(update={"optim": settings_of(name)})
    expected = optimizer()
    rates = rates_of(expected, build_lr_scheduler(expected, settings.optim))

    def trainer() -> DiffusersFSDPEngine:
        engine = DiffusersFSDPEngine(config, settings)
        engine.initialize()
        return engine

    engine = trainer()
    found = [engine.update_policy([batch])["lr"] for _ in range(4)]
    engine.save_checkpoint(tmp_path / "checkpoint")
    resumed = trainer()
    resumed.load_checkpoint(tmp_path / "checkpoint")
    for _ in range(4):
        metrics = [each.update_policy([batch]) for each in (engine, resumed)]
        assert metrics[0] == metrics[1]
        found.append(metrics[1]["lr"])
    assert found == rates[:8]
    weights = [each.gather_weights() for each in (engine, resumed)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
