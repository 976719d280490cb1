"""What can be known to be wrong before any model loads."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import models.families  # noqa: F401  registers the adapters
from flows.capacity import check_fits, measure_cost
from flows.config import TrainConfig
from flows.early import check_folder, raising_config_errors
from flows.errors import ConfigError
from models.algorithms import check_loss_inputs, get_diffusion_adv_estimator_fn, get_diffusion_loss_fn
from models.algorithms.losses import OLD_MEAN, TEACHER_MEAN, TRAINER_TYPES
from models.base import DiffusionModelBase, DiffusionModelConfig, read_architecture
from models.engines.sequence_parallel import check_sequence_split
from models.engines.training_engine import get_training_engine
from models.engines.vllm_omni.engine import check_tensor_split, pipeline_class
from models.engines.weights import LORA_FILE
from models.flops import PolicyFlops
from models.latents import text_width
from tasks.dataset import INDEX, Prompt, PromptEmbeddings, load_prompts
from tasks.pairs import PairDataset
from tasks.rewards import check_reward


@dataclass(frozen=True)
class Inputs:
    """What a checked config refers to.

    Attributes:
        pairs: None where samples are made and not read.
        flops: operations of rollout and update; None where the run does not train, or the model cannot be counted.
        digest: of the prompt table and of the indices of embeddings and pairs.
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
    get_diffusion_adv_estimator_fn(config.algorithm.adv_estimator)
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
    _check_teacher(config, model_config)
    train, test = load_prompts(config.data.prompts, "train"), load_prompts(config.data.prompts, "test")
    test = test[: rollout.val_kwargs.max_prompts]
    embeddings = PromptEmbeddings.open(config.data.embeddings)
    content = config.data.prompts.read_bytes() + (config.data.embeddings / INDEX).read_bytes()
    pairs = None
    if not config.samples:
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
    return Inputs(model_config, train, test, embeddings, pairs, hashlib.sha256(content).hexdigest()[:16], flops)


def _check_count(config: TrainConfig, there: int) -> None:
    """There is enough for one iteration."""
    offline = not config.samples
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
    return pairs


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


def _check_loss(config: TrainConfig) -> None:
    """The loss is known, gets what it declares, and does not divide by a standard deviation of 0."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    name, steps = actor.diffusion_loss.loss_mode, rollout.pipeline.num_inference_steps
    weighted = config.algorithm.rollout_correction.rollout_is is not None
    check_loss_inputs(name, actor.use_kl_loss, weighted, actor.teacher_path is not None)
    loss = get_diffusion_loss_fn(name)
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
        return
    gaussian = {OLD_MEAN, TEACHER_MEAN} & {*loss.required_data_keys}
    divides = f"loss {name}" if gaussian else "use_kl_loss" if actor.use_kl_loss else None
    if divides and rollout.algo.sde_type == "cps" and rollout.algo.window_bounds(steps)[1] == steps:
        raise ConfigError(
            f"rollout.algo.sde_window_range ends at the last of {steps} steps, whose standard deviation is 0 with cps, "
            f"and {divides} divides by it: let it end at {steps - 1} or before"
        )
