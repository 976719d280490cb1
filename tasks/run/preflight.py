"""What can be known to be wrong before any model loads."""

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from models.algorithms import check_advantage, check_loss_inputs, get_diffusion_loss_fn
from models.algorithms.losses import OLD_MEAN, TEACHER_MEAN, TRAINER_TYPES
from models.cost.flops import PolicyFlops
from models.families import load_families
from models.families.base import DiffusionModelBase, DiffusionModelConfig, read_architecture
from models.families.latents import text_width
from models.rollout.vllm_omni.engine import check_tensor_split, pipeline_class
from models.schedulers import FlowMatchSDEDiscreteScheduler, check_kernel, leftover_noise
from models.training.engine import get_training_engine
from models.training.sequence_parallel import check_sequence_split
from models.weights.trainable import LORA_FILE, check_initial_weights
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.data.base_weights import KnownDigests, check_recorded, weights_digest
from tasks.data.digests import IMAGE_SIDE, TEXT_SIDE, check_files, made_with
from tasks.data.embeddings import INDEX, PromptEmbeddings
from tasks.data.pairs import PairDataset
from tasks.data.prompts import Prompt, load_prompts
from tasks.records.lineage import dvc_hashes
from tasks.rewards import check_reward
from tasks.run.capacity import check_fits, measure_cost
from tasks.run.early import check_folder, raising_config_errors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What a checked config refers to.

    Attributes:
        pairs: None where samples are made and not read.
        flops: operations of rollout and update; None where the run does not train, or the model cannot be counted.
        digest: 16 hexadecimal digits over the prompt table and the indices of embeddings and pairs, "-", and 16 over
            the weights that the run begins with: of `model.path`, `model.initial_weights` and `actor.teacher_path`.
    """

    model_config: DiffusionModelConfig
    train: list[Prompt]
    test: list[Prompt]
    embeddings: PromptEmbeddings
    pairs: PairDataset | None
    digest: str
    flops: PolicyFlops | None = None


@raising_config_errors
def check_inputs(config: TrainConfig, trains: bool = True) -> Inputs:
    """Resolve every name and file of the config.

    Args:
        trains: check, too, that the update and the rollout fit the GPUs, and that the run can write its folder.

    Raises:
        ConfigError, or the named thing's own error: one sentence, what is wrong and what would be right.
    """
    rollout = config.actor_rollout_ref.rollout
    load_families(config.actor_rollout_ref.model.external_lib)
    check_advantage(config.algorithm.adv_estimator, config.algorithm.adv_options)
    check_kernel(rollout.algo.sde_type, rollout.algo.sde_options)
    get_training_engine(config.actor_rollout_ref.actor.strategy)
    _check_loss(config)
    for name, entry in config.reward.named().values():
        check_reward(name, **entry.options)
    model_config = DiffusionModelConfig.load(config.actor_rollout_ref.model, rollout.pipeline, rollout.algo)
    adapter = DiffusionModelBase.get_class(model_config)
    for pipeline in (rollout.pipeline, rollout.validation_pipeline()):
        adapter.check_pipeline(replace(model_config, pipeline=pipeline))
    if trains and config.algorithm.trainer_type == "direct_preference" and adapter.is_guided(rollout.pipeline):
        raise ConfigError(
            f"rollout.pipeline.{adapter.pipeline_fields[0]} asks for guidance, but loss "
            f"{config.actor_rollout_ref.actor.diffusion_loss.loss_mode} trains the velocity without it: leave it out"
        )
    if rollout.name == "vllm_omni":
        pipeline_class(model_config)
        check_tensor_split(model_config, rollout.vllm_omni.tensor_parallel_size)
    latent_shape = adapter.latent_shape(model_config)
    if trains:
        _check_exploration(config, adapter.build_scheduler(model_config))
    _check_teacher(config, model_config)
    if trains:
        check_initial_weights(adapter, model_config)
    train, test = load_prompts(config.data.prompts, "train"), load_prompts(config.data.prompts, "test")
    test = test[: rollout.val_kwargs.max_prompts]
    embeddings = PromptEmbeddings.open(config.data.embeddings)
    content = config.data.prompts.read_bytes() + (config.data.embeddings / INDEX).read_bytes()
    pairs = None
    if not config.is_online:
        pairs = _open_pairs(config, embeddings, latent_shape)
        content += (config.data.pairs / INDEX).read_bytes()
    _check_count(config, len(train) if pairs is None else len(pairs.pairs))
    missing = [prompt for prompt in train + test if prompt.uid not in embeddings]
    if missing:
        raise ConfigError(
            f"{config.data.embeddings} lacks the embedding of {missing[0].prompt!r} ({len(missing)} in all): run "
            "`dvc repro embeddings`"
        )
    _check_embeddings(config, embeddings, adapter.prompt_extras)
    sharing = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    check_sequence_split(model_config, sharing, embeddings.max_sequence_length)
    flops = None
    if trains:
        uids = [prompt.uid for prompt in train + test] if pairs is None else [pair.prompt_uid for pair in pairs.pairs]
        flops = measure_cost(config, model_config, embeddings, uids)
    if flops is not None:
        check_fits(config, model_config, flops.cost)
    if trains:
        check_folder(config.trainer.default_local_dir)
    digest = f"{hashlib.sha256(content).hexdigest()[:16]}-{_weights_digest(config, trains)}"
    return Inputs(model_config, train, test, embeddings, pairs, digest, flops)


def _weights_digest(config: TrainConfig, trains: bool) -> str:
    """Of the weights that the run begins with; they and the prompt table are what DVC has recorded, where it has."""
    settings, known = config.actor_rollout_ref, KnownDigests()
    model = Path(settings.model.path)
    check_recorded([config.data.prompts, model], dvc_hashes(Path(".")), known)
    others = (settings.model.initial_weights, settings.actor.teacher_path) if trains else ()
    return weights_digest([model, *(Path(folder) for folder in others if folder is not None)], known)


def _check_exploration(config: TrainConfig, scheduler: FlowMatchSDEDiscreteScheduler) -> None:
    """What the window's steps add is taken away again by those that follow, nearly."""
    rollout = config.actor_rollout_ref.rollout
    algo, steps = rollout.algo, rollout.pipeline.num_inference_steps
    if config.algorithm.trainer_type != "policy_gradient" or not config.is_online:
        return
    left = leftover_noise(scheduler, algo)
    if left > algo.max_leftover_noise:
        low, high = algo.window_bounds(steps)
        size = algo.sde_window_size or high - low
        raise ConfigError(
            f"exploring would leave noise of standard deviation {left:.2f} in the finished latents, more than "
            f"rollout.algo.max_leftover_noise {algo.max_leftover_noise:g}: {size} steps of [{low}, {high}) of "
            f"{steps} with {algo.sde_type} at noise_level {algo.noise_level:g}; let sde_window_range end earlier or "
            "lower noise_level"
        )


def _check_count(config: TrainConfig, there: int) -> None:
    """There is enough for one iteration."""
    offline = not config.is_online
    file, what = (config.data.pairs, "pairs") if offline else (config.data.prompts, "train prompts")
    if there < config.data.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size is {config.data.train_batch_size} but {file} has only {there} {what}: lower it or "
            f"add {what}"
        )


def _open_pairs(config: TrainConfig, embeddings: PromptEmbeddings, latent_shape: tuple[int, ...]) -> PairDataset:
    """The pairs fit the model's latents, and their prompts are encoded."""
    pairs = PairDataset.open(config.data.pairs)
    if pairs.latent_shape != tuple(latent_shape):
        raise ConfigError(
            f"{config.data.pairs} holds latents {list(pairs.latent_shape)} but rollout.pipeline height and width make "
            f"{list(latent_shape)}: set them to the size of the pairs' pictures"
        )
    missing = [pair for pair in pairs.pairs if pair.prompt_uid not in embeddings]
    if missing:
        raise ConfigError(
            f"{config.data.embeddings} lacks the embedding of the prompt of pair {missing[0].uid!r} ({len(missing)} in "
            "all): put the pairs' prompts into the prompt table and run `dvc repro embeddings`"
        )
    _check_origin(config, config.data.pairs, pairs, IMAGE_SIDE, "pairs")
    return pairs


def _check_origin(
    config: TrainConfig, folder: Path, data: PromptEmbeddings | PairDataset, parts: tuple[str, ...], stage: str
) -> None:
    """What was encoded before was encoded by these parts of this model, and is as it was written.

    Data of older versions cannot be compared: it is taken, with a warning.
    """
    model, maker = config.actor_rollout_ref.model.path, " and ".join(part.rstrip("*") for part in parts)
    same = made_with(data.model_digest, model, parts)
    if same is False:
        raise ConfigError(
            f"data.{stage} {folder} was made with another {maker} than actor_rollout_ref.model.path {model} has: make "
            f"it with `python -m flows.prepare {stage} --model {model} --out {folder}`, or give the model that made it"
        )
    if data.sha256 is None:
        log.warning(
            "data.%s %s is of an older version: whether the %s of %s made it, and whether it is whole, is not checked; "
            "`python -m flows.prepare %s` makes it anew",
            *(stage, folder, maker, model, stage),
        )
        return
    check_files(folder, data.sha256)


def _check_teacher(config: TrainConfig, model_config: DiffusionModelConfig) -> None:
    """The teacher, where there is one, is of the same family."""
    path = config.actor_rollout_ref.actor.teacher_path
    if path is None or (Path(path) / LORA_FILE).is_file():
        return
    if not (Path(path) / "model_index.json").is_file():
        raise ConfigError(
            f"actor.teacher_path is {path}, which has neither model_index.json nor {LORA_FILE}: give a folder "
            "that a run exported or a model in diffusers format"
        )
    architecture = read_architecture(path)
    if architecture != model_config.architecture:
        raise ConfigError(
            f"actor.teacher_path is a {architecture} but model.path a {model_config.architecture}: teacher and student "
            "must be of one architecture"
        )


def _check_embeddings(config: TrainConfig, embeddings: PromptEmbeddings, extras: tuple[str, ...]) -> None:
    """They hold what the model needs, and were made as the run expects."""
    lacking = sorted(set(extras) - set(embeddings.extras))
    if lacking:
        raise ConfigError(
            f"data.embeddings {config.data.embeddings} lacks {', '.join(lacking)}: encode the prompts with "
            f"actor_rollout_ref.model.path {config.actor_rollout_ref.model.path}"
        )
    width = text_width(config.actor_rollout_ref.model.path)
    if width not in (None, embeddings.dim):
        raise ConfigError(
            f"data.embeddings {config.data.embeddings} holds vectors of {embeddings.dim} numbers, but the transformer "
            f"of actor_rollout_ref.model.path {config.actor_rollout_ref.model.path} takes {width}: encode the prompts "
            "with it"
        )
    wanted = config.actor_rollout_ref.rollout.pipeline.max_sequence_length
    if wanted not in (None, embeddings.max_sequence_length):
        raise ConfigError(
            f"rollout.pipeline.max_sequence_length is {wanted}, but {config.data.embeddings} was encoded with "
            f"{embeddings.max_sequence_length}: encode the prompts again or leave the field out"
        )
    _check_origin(config, config.data.embeddings, embeddings, TEXT_SIDE, "embeddings")


def _check_loss(config: TrainConfig) -> None:
    """The loss is known, gets what it declares, and does not divide by a standard deviation of 0."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    name, steps = actor.diffusion_loss.loss_mode, rollout.pipeline.num_inference_steps
    weighted = config.algorithm.rollout_correction.rollout_is is not None
    options = actor.diffusion_loss.options
    check_loss_inputs(name, actor.use_kl_loss, weighted, actor.teacher_path is not None, options)
    loss = get_diffusion_loss_fn(name, options)
    for field, right in (("trainer_type", TRAINER_TYPES[loss.process]), ("paired_preference", loss.paired)):
        if getattr(config.algorithm, field) != right:
            raise ConfigError(
                f"algorithm.{field} is {getattr(config.algorithm, field)}, but loss {name!r} needs {right}: set it, or "
                "give the algorithm.name that brings both"
            )
    if config.trainer.one_step_off_policy and "old_log_probs" not in loss.required_data_keys:
        raise ConfigError(
            f"trainer.one_step_off_policy is true, but loss {name!r} compares with no old log-probs, so it would take "
            "samples of older weights for its own: set it to false"
        )
    if loss.process == "forward":
        if actor.kl_loss_type != "gaussian":
            raise ConfigError(
                f"actor.kl_loss_type is {actor.kl_loss_type}, but with loss {name} the distance to the start is that "
                "of the velocities, which has no step length: leave it out"
            )
        return
    _check_steps(config)
    gaussian = {OLD_MEAN, TEACHER_MEAN} & {*loss.required_data_keys}
    divides = f"loss {name}" if gaussian else "use_kl_loss" if actor.use_kl_loss else None
    if divides and rollout.algo.sde_type == "cps" and rollout.algo.window_bounds(steps)[1] == steps:
        raise ConfigError(
            f"rollout.algo.sde_window_range ends at the last of {steps} steps, whose standard deviation is 0 with cps, "
            f"and {divides} divides by it: let it end at {steps - 1} or before"
        )


def _check_steps(config: TrainConfig) -> None:
    """There is a step to learn from that the picture survives, and the KL's form has a meaning for the kernel."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    kernel, steps = rollout.algo.sde_type, rollout.pipeline.num_inference_steps
    if steps == 1:
        why = "has no noise and no gradient" if kernel == "cps" else "would leave its noise in the finished picture"
        raise ConfigError(
            f"rollout.pipeline.num_inference_steps is 1, but loss {actor.diffusion_loss.loss_mode} trains on the "
            f"sampler's random steps, and the last one {why} with {kernel}: take at least 2"
        )
    low, high = rollout.algo.window_bounds(steps)
    if kernel == "cps" and high == steps and (rollout.algo.sde_window_size or high - low) == 1:
        raise ConfigError(
            f"rollout.algo.sde_window_range [{low}, {high}) with one trained step may choose the last of {steps}, "
            f"which has no noise and no gradient with cps: let it end at {steps - 1}"
        )
    if actor.kl_loss_type == "flow_grpo" and kernel == "cps":
        raise ConfigError(
            "actor.kl_loss_type is flow_grpo, which leaves out the step length of sd = g sqrt(-D), but sde_type is "
            "cps, whose deviation has none: use gaussian, which is public code's form for cps too"
        )
