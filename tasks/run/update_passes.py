# SPDX-License-Identifier: Apache-2.0
"""How many passes over the model an optimiser step makes, by the config alone."""

from models.algorithms import get_diffusion_loss_fn
from tasks.config.tree import TrainConfig
from tasks.data.pairs import SIDES


def trained_steps(config: TrainConfig) -> int:
    """Timesteps of each sample that an update trains on."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    inference_steps = rollout.pipeline.num_inference_steps
    if algorithm.trainer_type == "direct_preference":
        return algorithm.levels_per_sample(inference_steps)
    return rollout.algo.window_length(inference_steps)


def learnt_of_a_prompt(config: TrainConfig) -> int:
    """Samples of a prompt whose advantage counts, where no reward is missing."""
    if config.algorithm.best_worst_k is not None:
        return 2 * config.algorithm.best_worst_k
    return config.actor_rollout_ref.rollout.n if config.is_online else len(SIDES)


def passes_of_a_step(config: TrainConfig) -> int:
    """Forward and backward passes that a rank makes in an optimiser step, where no sample drops out.

    `config` has numbers for the sizes that may be auto.
    """
    actor = config.actor_rollout_ref.actor
    return _micro_batches(config) * (trained_steps(config) // actor.levels_per_pass)


def _micro_batches(config: TrainConfig) -> int:
    """As the engine cuts them: sampled batches each for itself, finished samples that are learnt from all at once."""
    actor, rollout, ranks = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data_ranks
    chosen = actor.diffusion_loss
    loss = get_diffusion_loss_fn(chosen.loss_mode, chosen.options)
    if loss.process == "reverse":
        batches = actor.ppo_mini_batch_size * rollout.n // (rollout.batch_size * ranks)
        return batches * -(-rollout.batch_size // actor.micro_batch)
    learnt = len(SIDES) if loss.paired else learnt_of_a_prompt(config)
    return -(-actor.ppo_mini_batch_size * learnt // (ranks * actor.micro_batch))
