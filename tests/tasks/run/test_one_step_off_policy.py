# SPDX-License-Identifier: Apache-2.0
"""What sampling an iteration ahead asks of config and trainer. Whole runs: `platform/test_one_step_off_policy.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.rollout.diffusers import DiffusersRolloutEngine
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.run.loss_checks import check_loss
from tests.support.helpers import actor_config, model_config, rollout_request


def config(algorithm: dict[str, Any] | None = None, **rollout: Any) -> TrainConfig:
    sections = {"algorithm": algorithm or {}, "actor_rollout_ref": {"rollout": rollout}}
    return TrainConfig.model_validate(sections | {"trainer": {"one_step_off_policy": True}})


@pytest.mark.parametrize(
    ("algorithm", "rollout", "message"),
    [
        ({}, {"placement": "colocated"}, "workers sleep during the update: set placement to separate"),
        ({"name": "dpo", "sample_source": "offline"}, {}, "offline has no rollout to overlap with"),
        ({"rollout_correction": {"bypass_mode": False}}, {}, "without rollout_is: the loss would compare with weights"),
        ({}, {"max_queued_batches": 15}, "queue 15 batches each and an iteration has 16: the update would wait"),
    ],
)
def test_what_cannot_overlap_is_refused(algorithm: dict, rollout: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(algorithm, **rollout)


def test_the_queues_of_all_workers_hold_an_iteration() -> None:
    """Sixteen batches: two workers that queue eight each take them, seven each do not."""
    config(num_actors=2, max_queued_batches=8)
    with pytest.raises(ValueError, match="2 rollout workers queue 7 batches each and an iteration has 16"):
        config(num_actors=2, max_queued_batches=7)


@pytest.mark.parametrize("correction", [{}, {"bypass_mode": False, "rollout_is": "step"}])
@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard", "flow_dppo"])
def test_losses_with_old_log_probs_can(name: str, correction: dict) -> None:
    allowed = config({"name": name, "rollout_correction": correction}, max_queued_batches=16)
    check_loss(allowed)
    assert allowed.digest() != allowed.with_changes({"trainer": {"one_step_off_policy": False}}).digest()


@pytest.mark.parametrize("name", ["diffusion_nft", "awm", "dpo"])
def test_losses_without_cannot(name: str) -> None:
    with pytest.raises(ConfigError, match=r"one_step_off_policy is true, but loss '\w+' compares with no old log-prob"):
        check_loss(config({"name": name}))


@pytest.mark.usefixtures("one_rank")
def test_the_trainer_holds_the_weights_of_before_the_update_and_saves_them(tiny_model: Path, tmp_path: Path) -> None:
    def engine(**arguments: Any) -> DiffusersFSDPEngine:
        made = DiffusersFSDPEngine(model_config(tiny_model), actor_config(), **arguments)
        made.initialize()
        return made

    _, trajectories = DiffusersRolloutEngine(model_config(tiny_model)).generate(rollout_request())
    batch = ActorBatch([(trajectories, torch.linspace(-1, 1, len(trajectories)))], len(trajectories))
    trainer = engine(keeps_previous=True)
    held = [trainer.gather_weights()]
    for _ in range(2):
        trainer.update_policy([batch, batch])
        held.append(trainer.gather_weights())
    trainer.save_checkpoint(tmp_path / "checkpoint")
    resumed = engine(keeps_previous=True)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    for one in (trainer, resumed):
        with one.holding("previous"):
            previous = one.gather_weights()
        assert all(torch.equal(previous[name], held[1][name]) for name in previous)
        assert all(torch.equal(now, held[2][name]) for name, now in one.gather_weights().items())
    assert not all(torch.equal(held[1][name], held[0][name]) for name in previous)
    with pytest.raises(ValueError, match=r"keeps no previous weights: .* trainer.one_step_off_policy"):
        engine().holding("previous")
