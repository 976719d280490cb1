"""What can be known to be wrong before any model loads."""

import hashlib
from dataclasses import dataclass

import models.families  # noqa: F401  registers the adapters
from flows.config import TrainConfig
from models.algorithms import check_loss_inputs, get_diffusion_adv_estimator_fn, needs_old_means
from models.base import DiffusionModelBase, DiffusionModelConfig
from tasks.dataset import INDEX, Prompt, PromptEmbeddings, load_prompts
from tasks.rewards import check_reward


class ConfigError(ValueError):
    """A run cannot start as configured."""


@dataclass(frozen=True)
class Inputs:
    """What a checked config refers to; `digest` is of the prompt table and of the embeddings' index."""

    model_config: DiffusionModelConfig
    train: list[Prompt]
    test: list[Prompt]
    embeddings: PromptEmbeddings
    digest: str


def check_inputs(config: TrainConfig) -> Inputs:
    """Resolve every name and file of the config.

    Raises:
        ConfigError, or the named thing's own error: one sentence, what is wrong and what would be right.
    """
    rollout = config.actor_rollout_ref.rollout
    get_diffusion_adv_estimator_fn(config.algorithm.adv_estimator)
    _check_loss(config)
    for name, entry in config.reward.named().values():
        check_reward(name, **entry.options)
    model_config = DiffusionModelConfig.load(config.actor_rollout_ref.model, rollout.pipeline, rollout.algo)
    DiffusionModelBase.get_class(model_config).latent_shape(model_config)
    train, test = load_prompts(config.data.prompts, "train"), load_prompts(config.data.prompts, "test")
    test = test[: rollout.val_kwargs.max_prompts]
    if len(train) < config.data.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size is {config.data.train_batch_size} but {config.data.prompts} has only {len(train)} "
            "train prompts: lower it or add prompts"
        )
    embeddings = PromptEmbeddings.open(config.data.embeddings)
    missing = [prompt for prompt in train + test if prompt.uid not in embeddings]
    if missing:
        raise ConfigError(
            f"{config.data.embeddings} lacks the embedding of {missing[0].prompt!r} ({len(missing)} in all): run "
            "`dvc repro embeddings`"
        )
    content = config.data.prompts.read_bytes() + (config.data.embeddings / INDEX).read_bytes()
    return Inputs(model_config, train, test, embeddings, hashlib.sha256(content).hexdigest()[:16])


def _check_loss(config: TrainConfig) -> None:
    """The loss is known, gets what it declares, and does not divide by a standard deviation of 0."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    loss, steps = actor.diffusion_loss.loss_mode, rollout.pipeline.num_inference_steps
    check_loss_inputs(loss, actor.use_kl_loss, config.algorithm.rollout_correction.rollout_is is not None)
    divides = f"loss {loss}" if needs_old_means(loss) else "use_kl_loss" if actor.use_kl_loss else None
    if divides and rollout.algo.sde_type == "cps" and rollout.algo.window_bounds(steps)[1] == steps:
        raise ConfigError(
            f"rollout.algo.sde_window_range ends at the last of {steps} steps, whose standard deviation is 0 with cps, "
            f"and {divides} divides by it: let it end at {steps - 1} or before"
        )
