# SPDX-License-Identifier: Apache-2.0
"""How many passes an optimiser step makes, counted from the config, and what single ones spare the memory."""

from typing import Any

import pytest

from tasks.config.tree import TrainConfig
from tasks.run.capacity import needs
from tasks.run.update_passes import passes_of_a_step
from tests.models.cost.test_memory import COST
from tests.support.helpers import model_config


def config_with(actor: dict[str, Any], rollout: dict[str, Any], **sections: Any) -> TrainConfig:
    """16 samples an optimiser step, sampled in 4 steps of which one is trained, or as the settings have it."""
    pipeline = {"height": 16, "width": 24, "num_inference_steps": 4}
    tree = {
        "data": {"train_batch_size": 4},
        "actor_rollout_ref": {
            "rollout": {"n": 4, "micro_batch_size": 4, "pipeline": pipeline, "algo": {"sde_window_size": 1}} | rollout,
            "actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 16} | actor,
        },
    }
    return TrainConfig.model_validate(tree | sections)


@pytest.mark.parametrize(
    ("actor", "rollout", "sections", "passes"),
    [
        ({}, {"micro_batch_size": 16}, {}, 1),
        ({}, {}, {}, 4),  # batches stay apart as they were sampled
        ({"ppo_micro_batch_size_per_gpu": 2}, {}, {}, 8),
        ({}, {"micro_batch_size": 16, "algo": {"sde_window_size": 2}}, {}, 2),
        ({"levels_per_pass": 2}, {"micro_batch_size": 16, "algo": {"sde_window_size": 2}}, {}, 1),
        ({}, {}, {"trainer": {"n_gpus_per_node": 4}}, 1),
        ({}, {}, {"algorithm": {"name": "diffusion_nft", "num_train_timesteps": 1}}, 1),  # finished samples are joined
        ({}, {}, {"algorithm": {"name": "diffusion_nft", "num_train_timesteps": 3}}, 3),
        (
            {"ppo_micro_batch_size_per_gpu": 8},
            {},
            {"algorithm": {"name": "diffusion_nft", "num_train_timesteps": 1, "best_worst_k": 1}},
            1,
        ),
        ({"ppo_micro_batch_size_per_gpu": 8}, {}, {"algorithm": {"name": "dpo", "num_train_timesteps": 1}}, 1),
    ],
)
def test_passes_of_an_optimiser_step(
    actor: dict[str, Any], rollout: dict[str, Any], sections: dict[str, Any], passes: int
) -> None:
    assert passes_of_a_step(config_with(actor, rollout, **sections)) == passes


def test_a_run_of_single_passes_needs_no_whole_gradients(tiny_model: Any) -> None:
    model = model_config(tiny_model)
    path = {"model": {"path": str(tiny_model)}}
    several, single = (
        needs(
            config_with({}, {"micro_batch_size": size}, trainer={"device": "cuda", "n_gpus_per_node": 1}).with_changes(
                {"actor_rollout_ref": path}
            ),
            model,
            COST,
        ).update.passing["gradients"]
        for size in (8, 16)
    )
    assert several == 4 * COST.trained
    assert single < several
