# SPDX-License-Identifier: Apache-2.0
"""What a run's model costs and its GPUs hold, and whether its checkpoints fit the disk: known before anything loads."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from models.algorithms import get_diffusion_loss_fn
from models.algorithms.losses import REF_VELOCITY, DiffusionLossFn
from models.cost.flops import Batch, PolicyFlops, has_formula
from models.cost.memory import (
    ADAMW_MOMENTS,
    GIB,
    KEPT_BY_A_SAMPLER,
    MASTER_BYTES,
    Need,
    kept_by_a_sampler,
    rollout_need,
    update_need,
)
from models.cost.meta_pass import PassCost, decoding_bytes, pass_cost
from models.errors import DoubleflowError
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import transformer_config
from models.weights.stored import read_shapes
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.data.digests import stored_parameters
from tasks.data.embeddings import Embeddings
from tasks.records.run_store import CHECKPOINTS, STAGES, numbers_in
from tasks.rewards import check_reward
from tasks.rewards.base import reward_input
from tasks.run.update_passes import passes_of_a_step, trained_steps
from tasks.system.files import bytes_on_disk, free_on_disk, on_one_disk

log = logging.getLogger(__name__)
TEXT_ENCODERS, ENCODERS, REWARDS = ("text_encoder*",), "text encoders", "rewards"
REWARD_PROCESS = 0.5 * GIB
"""Of a GPU, for each reward worker that computes on it: what CUDA keeps of a process that has no weights yet."""
CHANNELS = 3
"""Of a picture, a byte each."""


class DoesNotFit(DoubleflowError, ValueError):
    """The run needs more memory than a GPU has, or more of the disk than is free."""


def measure_cost(
    config: TrainConfig, model_config: DiffusionModelConfig, embeddings: Embeddings, uids: Sequence[str]
) -> PolicyFlops | None:
    """What a micro-batch with the longest of these prompts costs; None where nothing is known of the transformer."""
    import diffusers  # here: seconds of work, once a model is there to be measured

    name = transformer_config(model_config)["_class_name"]
    if not hasattr(diffusers, name) or not has_formula(model_config):
        log.warning("%s is no transformer that this project can count: no perf/mfu, and no check of memory", name)
        return None
    actor = config.actor_rollout_ref.actor
    guided = DiffusionModelBase.get_class(model_config).is_guided(model_config.pipeline)
    prompts = embeddings.longest_table(uids, guided)
    if prompts is None:
        log.warning("how long the text of %s is cannot be told before it is encoded: no check of memory", name)
        return None
    computed = actor.fsdp_config.param_dtype or model_config.model.dtype
    samples, checkpointing = actor.rows_of_pass, actor.fsdp_config.gradient_checkpointing
    cost = pass_cost(
        in_format(model_config, computed), prompts, samples, checkpointing, actor.guidance_gradient == "conditional"
    )
    return PolicyFlops(model_config, cost, Batch(samples, *prompts.lengths))


class Model(NamedTuple):
    """What a run trains, and what a micro-batch of it costs."""

    config: DiffusionModelConfig
    cost: PassCost


class Needs(NamedTuple):
    """What a trainer rank holds, and a rollout worker; None where nothing is sampled.

    Attributes:
        model: of which that was counted.
        encoders: bytes of the run's text encoders on the first rank's GPU, where they are colocated with it.
        rewards: bytes of the rewards that are colocated with the ranks, on the GPU that has the most of them.
        kept: so many times what passes in the rollout worker its process keeps on a GPU.
    """

    update: Need
    rollout: Need | None
    model: Model
    encoders: float = 0.0
    rewards: float = 0.0
    kept: float = KEPT_BY_A_SAMPLER

    def beside_what_stays(self, config: TrainConfig) -> "Needs":
        """The same, with what stays on the GPU while trainer or rollout compute there: rewards, and text encoders that
        do not sleep."""
        awake = 0.0 if config.data.text_encoder.sleeps else self.encoders
        update = self.update
        for name, size in ((ENCODERS, awake), (REWARDS, self.rewards)):
            update = update.with_resident(name, size) if size else update
        return self._replace(update=update)


def check_disk(config: TrainConfig, cost: PassCost) -> None:
    """Raises DoesNotFit for a run whose checkpoints, and the rollouts kept from one to the next, have no room in its
    folder, beside those that are there already."""
    trainer, folder = config.trainer, config.run_dir / CHECKPOINTS
    each = checkpoint_bytes(config, cost) / GIB
    room = _room(folder)
    saves = -(-trainer.total_training_steps // trainer.save_freq) if trainer.save_freq else 1
    number = min(trainer.max_actor_ckpt_to_keep + 1, saves)
    if number * each > room:
        together = f" and {number} of them, at a time, {number * each:.1f}" if number > 1 else ""
        raise DoesNotFit(
            f"a checkpoint takes {each:.1f} GiB{together}, but {folder} has room for {room:.1f}: make some, or set "
            "trainer.default_local_dir to a folder on a larger disk"
        )
    if trainer.keep_stages and config.is_online:
        _check_kept_rollouts(config, number * each)


def _check_kept_rollouts(config: TrainConfig, checkpoints: float) -> None:
    """Raises DoesNotFit where there is no room for them beside so many GiB of checkpoints."""
    trainer, folder = config.trainer, config.run_dir / STAGES
    each, number = kept_rollout_bytes(config) / GIB, kept_rollouts(config)
    room = _room(folder)
    if on_one_disk(folder, saved := config.run_dir / CHECKPOINTS):
        room += bytes_on_disk(saved) / GIB - checkpoints
    if number * each > room:
        often = trainer.save_freq or "0, only at the end"
        raise DoesNotFit(
            f"trainer.keep_stages keeps each rollout until the next checkpoint, at least {each:.1f} GiB and, with "
            f"trainer.save_freq {often}, {number * each:.1f} for {number} of them, but beside the checkpoints {folder} "
            f"has room for {room:.1f}: save more often, set trainer.keep_stages to false, or trainer.default_local_dir "
            "to a folder on a larger disk"
        )


def _room(folder: Path) -> float:
    """GiB that a folder of a run may take, with what it has."""
    return (free_on_disk(folder) + bytes_on_disk(folder)) / GIB


def kept_rollouts(config: TrainConfig) -> int:
    """The most iterations whose rollouts are kept at a time, of those that no checkpoint has yet."""
    trainer, saved = config.trainer, config.run_dir / CHECKPOINTS
    done = max(numbers_in(saved), default=0) if saved.is_dir() else 0
    left = max(trainer.total_training_steps - done, 0)
    return min(trainer.save_freq + trainer.one_step_off_policy, left) if trainer.save_freq else left


def kept_rollout_bytes(config: TrainConfig) -> int:
    """An iteration's samples on the disk, at least: latents in fp32 of each recorded step and what the rewards look at.
    The prompts' embeddings, means and halves of the guidance that a loss may ask for, and gaps in a window come on top.
    """
    rollout = config.actor_rollout_ref.rollout
    model_config = DiffusionModelConfig.load(config.actor_rollout_ref.model, rollout.pipeline, rollout.algo)
    latent = prod(DiffusionModelBase.get_class(model_config).latent_shape(model_config)) * torch.float32.itemsize
    pictures = rollout.pipeline.height * rollout.pipeline.width * CHANNELS * (rollout.pipeline.num_frames or 1)
    recorded = 1 if config.algorithm.trainer_type == "direct_preference" else trained_steps(config) + 1
    wanted = {reward_input(name, **entry.options) for name, entry in config.reward.named().values()}
    shown = ("latents" in wanted) * latent + bool(wanted - {"latents"}) * pictures
    return config.data.train_batch_size * rollout.n * (recorded * latent + shown)


def checkpoint_bytes(config: TrainConfig, cost: PassCost) -> int:
    """A checkpoint on the disk: the trained weights, AdamW's moments, and the further sets of the weights."""
    return cost.trained * MASTER_BYTES * (1 + ADAMW_MOMENTS + _copies(config))


def needs(
    config: TrainConfig, model_config: DiffusionModelConfig, cost: PassCost, samples: bool | None = None
) -> Needs:
    """What one trainer rank, one rollout worker, and text encoders and rewards that share their GPU need of it.

    Args:
        samples: is there a rollout? None: as training has it; a measurement starts one for an offline recipe, too.
    """
    there = config.is_online if samples is None else samples
    rollout = _rollout(config, model_config, cost) if there else None
    kept = kept_by_a_sampler(model_config, config.actor_rollout_ref.rollout.name)
    model = Model(model_config, cost)
    rewards = colocated_rewards(config) if there else 0.0  # offline training has none
    return Needs(update_of_rank(config, model), rollout, model, colocated_encoders(config), rewards, kept)


def colocated_encoders(config: TrainConfig) -> float:
    """Bytes of the weights of the run's text encoders on the first rank's GPU; 0 without such."""
    encoder = config.data.encoders
    return 0.0 if encoder is None or not encoder.is_colocated else encoder_bytes(config)


def colocated_rewards(config: TrainConfig) -> float:
    """Bytes of the rewards on the first rank's GPU, which has the most of them: their processes, and their weights as
    far as they are known; 0 without such. Raises ConfigError where a file of weights is not whole."""
    if config.trainer.device != "cuda":
        return 0.0
    return sum(
        workers * (REWARD_PROCESS + _weights_of_reward(label, name, entry.options))
        for label, (name, entry) in config.reward.named().items()
        if (workers := entry.colocated_workers(config.trainer.world_size))
    )


def uncounted_rewards(config: TrainConfig) -> str | None:
    """Which rewards compute on a GPU that nothing gives them, in a sentence; None where there are none.

    Ray hides no GPU from a worker that asked for none.
    """
    labels = [
        label
        for label, (_, entry) in config.reward.named().items()
        if str(entry.options.get("device")).startswith("cuda") and not (entry.num_gpus or entry.is_colocated)
    ]
    if not labels:
        return None
    return (
        f"{', '.join(f'reward.functions.{label}' for label in labels)}: the option device is cuda, but num_gpus is 0, "
        "so all workers take the first GPU, which neither Ray nor the estimate of memory counts: set num_gpus to each "
        "worker's share of one, or placement to colocated"
    )


def _weights_of_reward(label: str, name: str, options: Mapping[str, Any]) -> float:
    declared = getattr(check_reward(name, **options), "gpu_models", None)
    folders, dtype = ([], "") if declared is None else declared(options)
    try:
        shapes = [read_shapes(at, "model", f"reward.functions.{label}: a model is {at}", False) for at in folders]
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    numbers = sum(prod(shape) for of_model in shapes for shape in of_model.values())
    return float(numbers * getattr(torch, dtype).itemsize) if numbers else 0.0


def encoder_bytes(config: TrainConfig) -> float:
    """Bytes of the weights of the run's text encoders, wherever they are."""
    encoder, model = config.data.text_encoder, config.actor_rollout_ref.model
    return float(stored_parameters(model.path, TEXT_ENCODERS) * getattr(torch, encoder.dtype or model.dtype).itemsize)


def samplers_on_a_gpu(config: TrainConfig) -> int:
    """Rollout workers on one GPU, on the one that has the most."""
    rollout = config.actor_rollout_ref.rollout
    share = rollout.num_gpus_per_actor
    return 1 if config.shares_gpus or not share else min(max(int(1 / share), 1), rollout.num_actors)


def update_of_rank(config: TrainConfig, model: Model, ranks: int | None = None) -> Need:
    """What a trainer rank holds of so many; None: as many as the config has."""
    actor, (model_config, cost) = config.actor_rollout_ref.actor, model
    refers = actor.use_kl_loss or REF_VELOCITY in _loss(config).required_data_keys
    return update_need(
        cost,
        model_config,
        actor,
        world_size=ranks or config.trainer.world_size,
        copies=_copies(config),
        frozen_models=(refers and not model_config.trains_lora) + (actor.teacher_path is not None),
        single_pass=passes_of_a_step(config) == 1,
    )


def _copies(config: TrainConfig) -> int:
    """Sets of the trained weights besides those that are trained."""
    kept = config.actor_rollout_ref.actor.ema.enable, _loss(config).keeps_old_policy()
    return sum(kept) + config.trainer.one_step_off_policy


def _loss(config: TrainConfig) -> DiffusionLossFn:
    chosen = config.actor_rollout_ref.actor.diffusion_loss
    return get_diffusion_loss_fn(chosen.loss_mode, chosen.options)


def _rollout(config: TrainConfig, model_config: DiffusionModelConfig, cost: PassCost) -> Need:
    settings = config.actor_rollout_ref.rollout
    samples = settings.batch_size
    vae = decoding_bytes(model_config, samples)
    return rollout_need(cost, model_config, vae, samples, settings.processes_per_worker)


def in_format(model_config: DiffusionModelConfig, dtype: str) -> DiffusionModelConfig:
    """The same model in numbers of that format."""
    return replace(model_config, model=model_config.model.model_copy(update={"dtype": dtype}))
