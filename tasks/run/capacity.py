# SPDX-License-Identifier: Apache-2.0
"""What a run's model costs, and whether it fits the GPUs and its checkpoints the disk: known before anything loads."""

import logging
from collections.abc import Sequence
from dataclasses import replace
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
from tasks.config.tree import TrainConfig
from tasks.data.digests import stored_parameters
from tasks.data.embeddings import Embeddings
from tasks.records.run_store import CHECKPOINTS
from tasks.run.update_passes import passes_of_a_step
from tasks.system.files import bytes_on_disk, free_on_disk
from tasks.system.gpu_memory import InUse, gpu_memory_in_use

log = logging.getLogger(__name__)
TEXT_ENCODERS, ENCODERS = ("text_encoder*",), "text encoders"


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
        _in_format(model_config, computed), prompts, samples, checkpointing, actor.guidance_gradient == "conditional"
    )
    return PolicyFlops(model_config, cost, Batch(samples, *prompts.lengths))


class Needs(NamedTuple):
    """What a trainer rank holds, and a rollout worker; None where nothing is sampled.

    Attributes:
        encoders: bytes of the run's text encoders on the first rank's GPU, where they are colocated with it.
        kept: so many times what passes in the rollout worker its process keeps on a GPU.
    """

    update: Need
    rollout: Need | None
    encoders: float = 0.0
    kept: float = KEPT_BY_A_SAMPLER

    def beside_encoders(self, config: TrainConfig) -> "Needs":
        """The same, where the text encoders stay on the GPU while others compute there."""
        if not self.encoders or config.data.text_encoder.sleeps:
            return self
        return self._replace(update=self.update.with_resident(ENCODERS, self.encoders))


def check_fits(config: TrainConfig, model_config: DiffusionModelConfig, cost: PassCost) -> Needs | None:
    """What a run on CUDA needs of a GPU; None where there is none to compare it with.

    Raises:
        DoesNotFit: its update or rollout needs more than a GPU has.
    """
    if config.trainer.device != "cuda":
        return None
    there = gpu_gib(config)
    if there is None:
        log.warning("the driver sees no GPU and trainer.gpu_memory_gib is null: whether the run fits is not checked")
        return None
    needed = needs(config, model_config, cost)
    lacking = shortfall(config, needed, there)
    if lacking:
        raise DoesNotFit(lacking)
    return needed


def warn_of_others(config: TrainConfig, needed: Needs) -> None:
    """Warn of each GPU of the driver's on which other programs leave too little for the run.

    No error: they may end before the memory is needed, and Ray may choose another GPU. To be called when the run has
    its turn and none of its actors has begun, else its own are among the others.
    """
    there = gpu_gib(config)
    if there is None:
        return
    for gpu in gpu_memory_in_use([str(properties.uuid) for properties in _visible_gpus()]):
        told = beside_others(config, needed, gpu, there)
        if told is not None:
            log.warning(told)


def beside_others(config: TrainConfig, needed: Needs, gpu: InUse, there: float) -> str | None:
    """What does not fit beside other programs into a GPU of `there` GiB, and what would be right; None if all fits."""
    lacking = shortfall(config, needed, max(there - gpu.gib, 0.0))
    if lacking is None:
        return None
    return (
        f"other programs have {gpu.gib:.1f} GiB of GPU {gpu.number} in use, of {there:.1f}, and {lacking}; or end "
        "them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
    )


def check_disk(config: TrainConfig, cost: PassCost) -> None:
    """Raises DoesNotFit for a run whose checkpoints have no room in its folder, beside those that are there already."""
    trainer, folder = config.trainer, config.run_dir / CHECKPOINTS
    each = checkpoint_bytes(config, cost) / GIB
    room = (free_on_disk(folder) + bytes_on_disk(folder)) / GIB
    saves = -(-trainer.total_training_steps // trainer.save_freq) if trainer.save_freq else 1
    number = min(trainer.max_actor_ckpt_to_keep + 1, saves)
    if number * each > room:
        together = f" and {number} of them, at a time, {number * each:.1f}" if number > 1 else ""
        raise DoesNotFit(
            f"a checkpoint takes {each:.1f} GiB{together}, but {folder} has room for {room:.1f}: make some, or set "
            "trainer.default_local_dir to a folder on a larger disk"
        )


def checkpoint_bytes(config: TrainConfig, cost: PassCost) -> int:
    """A checkpoint on the disk: the trained weights, AdamW's moments, and the further sets of the weights."""
    return cost.trained * MASTER_BYTES * (1 + ADAMW_MOMENTS + _copies(config))


def needs(
    config: TrainConfig, model_config: DiffusionModelConfig, cost: PassCost, samples: bool | None = None
) -> Needs:
    """What one trainer rank, one rollout worker, and text encoders that share their GPU need of it.

    Args:
        samples: is there a rollout? None: as training has it; a measurement starts one for an offline recipe, too.
    """
    there = config.is_online if samples is None else samples
    rollout = _rollout(config, model_config, cost) if there else None
    kept = kept_by_a_sampler(model_config, config.actor_rollout_ref.rollout.name)
    return Needs(_update(config, model_config, cost), rollout, colocated_encoders(config), kept)


def colocated_encoders(config: TrainConfig) -> float:
    """Bytes of the weights of the run's text encoders on the first rank's GPU; 0 without such."""
    encoder = config.data.encoders
    return 0.0 if encoder is None or not encoder.is_colocated else encoder_bytes(config)


def encoder_bytes(config: TrainConfig) -> float:
    """Bytes of the weights of the run's text encoders, wherever they are."""
    encoder, model = config.data.text_encoder, config.actor_rollout_ref.model
    return float(stored_parameters(model.path, TEXT_ENCODERS) * getattr(torch, encoder.dtype or model.dtype).itemsize)


def shortfall(config: TrainConfig, needs: Needs, there: float) -> str | None:
    """What does not fit into a GPU of `there` GiB and which settings are left to change it; None where all fits."""
    return _encoding_shortfall(config, needs, there) or _stages_shortfall(config, needs.beside_encoders(config), there)


def _encoding_shortfall(config: TrainConfig, needs: Needs, there: float) -> str | None:
    """Prompts are encoded beside the trainer's weights and, where it is there too, those of the rollout, awake."""
    beside = dict(needs.update.resident)
    if needs.rollout is not None and config.shares_gpus:
        beside["the rollout's weights"] = sum(needs.rollout.resident.values())
    together = Need(beside | {ENCODERS: needs.encoders}, {})
    if not needs.encoders or together.gib <= there:
        return None
    return (
        f"encoding prompts needs {together.gib:.1f} GiB on the first GPU ({together.sentence()}) but there are "
        f"{there:.1f}: set data.text_encoder.placement to separate, or its device to cpu"
    )


def _stages_shortfall(config: TrainConfig, needs: Needs, there: float) -> str | None:
    update, rollout = needs.update, needs.rollout
    if update.gib > there:
        return (
            f"the update needs {update.gib:.1f} GiB on each GPU ({update.sentence()}) but there are {there:.1f}: "
            f"{_advice(config, update, there)}"
        )
    if rollout is None:
        return None
    settings = config.actor_rollout_ref.rollout
    if config.shares_gpus and settings.enable_sleep_mode is False and update.gib + rollout.gib > there:
        return (
            f"update and rollout need {update.gib + rollout.gib:.1f} GiB together on each GPU ({update.sentence()}; "
            f"{rollout.sentence()}) but there are {there:.1f}, and rollout.enable_sleep_mode is false: set it to true"
        )
    beside, why = 0.0, ""
    if config.shares_gpus:
        beside, why = sum(update.resident.values()) / GIB, " beside the trainer's weights"
    needed = beside + samplers_on_a_gpu(config) * rollout.gib
    if needed <= there:
        return None
    return (
        f"the rollout needs {needed:.1f} GiB on each GPU{why} ({rollout.sentence()} for each worker) but there are "
        f"{there:.1f}: lower rollout.micro_batch_size, now {settings.micro_batch_size}, "
        + ("set rollout.placement to separate" if config.shares_gpus else "or raise rollout.num_gpus_per_actor")
    )


def samplers_on_a_gpu(config: TrainConfig) -> int:
    """Rollout workers on one GPU."""
    share = config.actor_rollout_ref.rollout.num_gpus_per_actor
    return 1 if config.shares_gpus or not share else max(int(1 / share), 1)


def _update(config: TrainConfig, model_config: DiffusionModelConfig, cost: PassCost) -> Need:
    actor = config.actor_rollout_ref.actor
    refers = actor.use_kl_loss or REF_VELOCITY in _loss(config).required_data_keys
    return update_need(
        cost,
        model_config,
        actor,
        world_size=config.trainer.world_size,
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


def _advice(config: TrainConfig, need: Need, there: float) -> str:
    """The settings that are left to make it smaller."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    ways = []
    batches = sum(size for name, size in need.passing.items() if name.startswith("activations"))
    if actor.micro_batch > 1 and need.gib - batches / GIB < there:  # else no micro-batch is small enough
        ways.append(f"lower actor.ppo_micro_batch_size_per_gpu, now {actor.micro_batch}")
    if actor.levels_per_pass > 1 and need.gib - batches / GIB < there:
        ways.append(f"lower actor.levels_per_pass, now {actor.levels_per_pass}")
    if not actor.fsdp_config.gradient_checkpointing:
        ways.append("set actor.fsdp_config.gradient_checkpointing to true")
    if _adds_up_whole_gradients(config):
        ways.append("set actor.fsdp_config.shard_gradients to true")
    if not actor.fsdp_config.param_offload:
        ways.append("set actor.fsdp_config.param_offload to true")
    if not actor.fsdp_config.reshard_after_forward and need.passing.get("gathered weights"):
        ways.append("set actor.fsdp_config.reshard_after_forward to true")
    if not model.trains_lora:
        ways.append("train LoRA with model.lora_rank")
    if model.dtype == "float32":
        ways.append("set model.dtype to bfloat16")
    ways.append(f"raise trainer.n_gpus_per_node, now {config.trainer.n_gpus_per_node}")
    return ", or ".join(ways)


def _adds_up_whole_gradients(config: TrainConfig) -> bool:
    """Of all weights, which ranks could divide."""
    settings = config.actor_rollout_ref
    divides = settings.actor.fsdp_config.shard_gradients or passes_of_a_step(config) == 1
    several = config.trainer.world_size > 1 or settings.actor.fsdp_config.param_offload
    return several and not divides and not settings.model.trains_lora


def _in_format(model_config: DiffusionModelConfig, dtype: str) -> DiffusionModelConfig:
    return replace(model_config, model=model_config.model.model_copy(update={"dtype": dtype}))


def gpu_gib(config: TrainConfig) -> float | None:
    """All of a GPU's memory: what others hold of it now, they may have given back when this run's turn comes."""
    if config.trainer.gpu_memory_gib is not None:
        return config.trainer.gpu_memory_gib
    return min((properties.total_memory / GIB for properties in _visible_gpus()), default=None)


def _visible_gpus() -> list[Any]:
    """torch's properties of those that the driver sees."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_properties(device) for device in range(torch.cuda.device_count())]
