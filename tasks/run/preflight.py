# SPDX-License-Identifier: Apache-2.0
"""What can be known to be wrong before any model loads."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from models.algorithms import check_advantage
from models.cost.flops import PolicyFlops
from models.cost.meta_pass import PassCost
from models.families import load_families
from models.families.base import DiffusionModelBase, DiffusionModelConfig, read_architecture
from models.families.latents import text_width
from models.rollout.vllm_omni.engine import check_tensor_split, pipeline_class
from models.runtime.projections import not_fused
from models.schedulers import check_kernel
from models.training.engine import TRAINING_ENGINES, get_training_engine
from models.training.schedules import check_lr_schedule, check_span
from models.training.sequence_parallel import check_sequence_split
from models.weights.trainable import LORA_FILE, check_exported, check_initial_weights
from tasks.actors.interpreter import check_interpreter
from tasks.actors.reward_model import check_reward_model
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.config.unread import told
from tasks.data.base_weights import KnownDigests, check_recorded, weights_digest
from tasks.data.digests import IMAGE_SIDE, MODEL_INDEX, TEXT_SIDE, check_files, component_names, made_with
from tasks.data.embeddings import INDEX, Embeddings, PromptEmbeddings
from tasks.data.pairs import PairDataset
from tasks.data.prompts import Prompt, load_prompts
from tasks.data.rewriting import get_rewriting
from tasks.records.lineage import dvc_hashes
from tasks.records.second_trackers import check_libraries
from tasks.rewards import check_reward
from tasks.run.capacity import Needs, check_disk, check_fits, measure_cost
from tasks.run.early import check_folder, check_home_signs, raising_config_errors
from tasks.run.live_text import open_live, text_side
from tasks.run.loss_checks import check_exploration, check_loss
from tasks.run.sizes import settle

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What a checked config refers to.

    Attributes:
        pairs: None where samples are made and not read.
        flops: operations of rollout and update; None where the run does not train, or the model cannot be counted.
        needs: what was found to fit a GPU; None where nothing was compared with one.
        config: the checked one, with values in place of auto.
        said, kept: see `Settled`.
        digest: 16 hexadecimal digits over the prompt table, the index of the embeddings or, where they are live, the
            text encoders, and the index of the pairs, "-", and 16 over
            the weights that the run begins with: of `model.path`, `model.initial_weights` and `actor.teacher_path`.
    """

    model_config: DiffusionModelConfig
    train: list[Prompt]
    test: list[Prompt]
    embeddings: Embeddings
    pairs: PairDataset | None
    digest: str
    config: TrainConfig
    flops: PolicyFlops | None = None
    needs: Needs | None = None
    said: dict[str, str] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)

    @property
    def to_encode(self) -> list[Prompt]:
        """The prompts whose length is looked at before the run, where it encodes them."""
        return self.train + self.test

    @property
    def uids(self) -> list[str]:
        """The uids of the prompts that the run computes with."""
        if self.pairs is not None:
            return [pair.prompt_uid for pair in self.pairs.pairs]
        return [prompt.uid for prompt in self.train + self.test]


@raising_config_errors
def check_inputs(config: TrainConfig, trains: bool = True, recorded: TrainConfig | None = None) -> Inputs:
    """Resolve every name and file of the config, and what is auto; warn of settings that nothing would read.

    Args:
        recorded: the config of the run's first start, where there was one: its sizes are the run's.
        trains: check, too, that the update and the rollout fit the GPUs, and that the run can write its folder.

    Raises:
        ConfigError, or the named thing's own error: one sentence, what is wrong and what would be right.
    """
    _check_names(config)
    if trains:
        _check_length(config)
    rollout = config.actor_rollout_ref.rollout
    model_config = DiffusionModelConfig.load(config.actor_rollout_ref.model, rollout.pipeline, rollout.algo)
    adapter = DiffusionModelBase.get_class(model_config)
    _check_engine(config, model_config)
    _check_pipelines(config, model_config, trains)
    latent_shape = adapter.latent_shape(model_config)
    if trains:
        check_exploration(config, adapter.build_scheduler(model_config))
    _check_teacher(config, model_config)
    if trains:
        check_initial_weights(adapter, model_config)
    inputs = _open_data(config, model_config, latent_shape, trains)
    sharing = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    check_sequence_split(model_config, sharing, inputs.embeddings.max_sequence_length)
    costs = _Costs(inputs)
    found = settle(config, model_config, costs.of_pass, recorded, trains)
    inputs = replace(inputs, config=found.config, said=found.said, kept=found.kept)
    flops, needed = _check_costs(inputs, costs) if trains else (None, None)
    if trains and (unread := told(config)) is not None:
        log.warning(unread)
    return replace(inputs, digest=f"{inputs.digest}-{_weights_digest(config, trains)}", flops=flops, needs=needed)


@raising_config_errors
def check_weights(model_config: DiffusionModelConfig, folder: Path) -> None:
    """The folder holds weights that a run with this config exported. Raises ConfigError, which says what it holds."""
    check_exported(DiffusionModelBase.get_class(model_config), model_config, folder, f"weights is {folder}")


def _check_names(config: TrainConfig) -> None:
    """What the config names is known: families, advantage, kernel, engine, loss and rewards."""
    check_home_signs(config)
    load_families(config.actor_rollout_ref.model.external_lib)
    check_advantage(config.algorithm.adv_estimator, config.algorithm.adv_options)
    check_kernel(config.actor_rollout_ref.rollout.algo.sde_type, config.actor_rollout_ref.rollout.algo.sde_options)
    check_loss(config)
    check_lr_schedule(config.scheduled_actor.optim)
    check_libraries(config.tracking)
    for name, entry in config.reward.named().values():
        check_reward(name, **entry.options)
    if config.data.rewrite_prompts is not None:
        get_rewriting(config.data.rewrite_prompts)
    check_reward_model(config.reward)


def _check_length(config: TrainConfig) -> None:
    """The run makes as many optimiser steps as its settings are for."""
    ema, planned = config.actor_rollout_ref.actor.ema, config.planned_optimizer_steps
    if ema.enable and planned < ema.update_interval:
        raise ConfigError(
            f"actor.ema.update_interval is {ema.update_interval}, but the run makes {planned} optimiser steps, so the "
            "average that it validates and exports would never move: lower it to at most that, let the run be longer, "
            "or set actor.ema.enable to false"
        )
    after_span = check_span(config.scheduled_actor.optim, planned)
    for beyond in filter(None, (after_span, *_beyond_the_end(config, planned))):
        log.warning(beyond)


def _beyond_the_end(config: TrainConfig, planned: int) -> Iterator[str]:
    """A sentence for each setting of what comes after the run's last step. No error: the run may be made longer.

    Args:
        planned: optimiser steps of the whole run.
    """
    warm_up, last = config.actor_rollout_ref.actor.optim.lr_warmup_steps, config.trainer.total_training_steps
    if warm_up > planned:
        yield (
            f"actor.optim.lr_warmup_steps is {warm_up}, but the run makes {planned} optimiser steps: the learning rate "
            "ends below actor.optim.lr"
        )
    late = ", ".join(str(number) for number in config.trainer.profile.iterations if number > last)
    if late:
        yield f"trainer.profile.iterations names {late}, but the run ends with iteration {last}: they have no traces"


def _check_engine(config: TrainConfig, model_config: DiffusionModelConfig) -> None:
    """The training engine is there, where the trainer's actors are to look for it, and takes the settings."""
    actor = config.actor_rollout_ref.actor
    if actor.python is not None:
        check_interpreter(actor)
        if actor.strategy not in TRAINING_ENGINES.entries:  # its module may be there alone
            return
    engine = get_training_engine(actor.strategy)
    library = getattr(engine, "library", None)
    if actor.python is None and library is not None and find_spec(library) is None:
        raise ConfigError(
            f"actor.strategy is {actor.strategy}, but {library} is not installed: install it, or let actor.python name "
            "the interpreter of an environment that has it (docs/training.md)"
        )
    if hasattr(engine, "check_settings"):
        engine.check_settings(actor, model_config)


def _check_pipelines(config: TrainConfig, model_config: DiffusionModelConfig, trains: bool) -> None:
    """The model can be sampled as the run's and the validation's pipeline ask, by the engine that is to do it."""
    rollout, adapter = config.actor_rollout_ref.rollout, DiffusionModelBase.get_class(model_config)
    for pipeline in (rollout.pipeline, rollout.validation_pipeline()):
        adapter.check_pipeline(replace(model_config, pipeline=pipeline))
    if trains and config.algorithm.trainer_type == "direct_preference" and adapter.is_guided(rollout.pipeline):
        raise ConfigError(
            f"rollout.pipeline.{adapter.pipeline_fields[0]} asks for guidance, but loss "
            f"{config.actor_rollout_ref.actor.diffusion_loss.loss_mode} trains the velocity without it: leave it out"
        )
    _check_products(config, adapter)
    if rollout.name == "vllm_omni":
        _check_denoisers_place(config)
        pipeline_class(model_config)
        check_tensor_split(model_config, rollout.vllm_omni.tensor_parallel_size)


def _check_denoisers_place(config: TrainConfig) -> None:
    """vLLM-Omni finds the denoiser where diffusers has it."""
    model = config.actor_rollout_ref.model
    for name in ("transformer_subfolder", "config_path"):
        value = getattr(model, name)
        if value != type(model).model_fields[name].default:
            raise ConfigError(
                f"model.{name} is {value}, but rollout.name is vllm_omni, which loads the denoiser of the folder "
                f"transformer by the config.json in it: set rollout.name to diffusers, or leave {name} out"
            )


def _check_products(config: TrainConfig, adapter: type[DiffusionModelBase]) -> None:
    """Rollout and trainer can both multiply as the model's settings ask."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if model.frozen_dtype is not None and rollout.name == "vllm_omni":
        raise ConfigError(
            f"model.frozen_dtype is {model.frozen_dtype}, but rollout.name is vllm_omni, which would sample from the "
            "model in its own format: set rollout.name to diffusers, or leave frozen_dtype out"
        )
    if model.fuse_projections and not adapter.projects_streams:
        raise ConfigError(not_fused(adapter))


def _open_data(
    config: TrainConfig, model_config: DiffusionModelConfig, latent_shape: tuple[int, ...], trains: bool
) -> Inputs:
    """The prompts, their embeddings and, to train, the pairs; the digest is over their tables and indices alone."""
    train, held_out = load_prompts(config.data.prompts, "train"), load_prompts(config.data.prompts, "test")
    test = held_out[: config.actor_rollout_ref.rollout.val_kwargs.max_prompts]
    embeddings, made_by = _open_embeddings(config, model_config)
    content = config.data.prompts.read_bytes() + made_by
    pairs = None
    if trains and not config.is_online:
        pairs = _open_pairs(config, embeddings, latent_shape, {prompt.uid for prompt in held_out})
        content += (config.data.pairs / INDEX).read_bytes()
    if trains:
        _check_count(config, len(train) if pairs is None else len(pairs.pairs))
    missing = [prompt for prompt in train + test if prompt.uid not in embeddings]
    if missing:
        raise ConfigError(
            f"{config.data.embeddings} lacks the embedding of {missing[0].prompt!r} ({len(missing)} in all): run "
            "`dvc repro embeddings`"
        )
    if isinstance(embeddings, PromptEmbeddings):
        check_embeddings(config, model_config, embeddings)
    if config.is_online or not trains:
        # What a function of the user's makes of the train prompts is known when it is called.
        check_scored(config, test if config.data.rewrite_prompts else train + test)
    return Inputs(model_config, train, test, embeddings, pairs, hashlib.sha256(content).hexdigest()[:16], config)


def check_scored(config: TrainConfig, prompts: Sequence[Prompt]) -> None:
    """The prompts say what the rewards look for. Raises RewardError, which names a prompt that does not."""
    for name, entry in config.reward.named().values():
        if isinstance(reward := check_reward(name, **entry.options), type):
            reward.check_prompts(name, entry.options, prompts)


def _open_embeddings(config: TrainConfig, model_config: DiffusionModelConfig) -> tuple[Embeddings, bytes]:
    """Those on disk or those that the run will make, and what stands for them in the digest of its data."""
    folder = config.data.embeddings
    if isinstance(folder, Path):
        embeddings = PromptEmbeddings.open(folder)
        return embeddings, (folder / INDEX).read_bytes()
    return open_live(config, model_config), text_side(config).encode()


class _Costs:
    """What micro-batches cost, each size measured once."""

    def __init__(self, inputs: Inputs):
        self._inputs = inputs
        self._found: dict[int, PolicyFlops | None] = {}

    def of(self, config: TrainConfig) -> PolicyFlops | None:
        """The cost of the config's own micro-batch; None where the model cannot be counted."""
        size, inputs = config.actor_rollout_ref.actor.rows_of_pass, self._inputs
        if size not in self._found:
            self._found[size] = measure_cost(config, inputs.model_config, inputs.embeddings, inputs.uids)
        return self._found[size]

    def of_pass(self, config: TrainConfig) -> PassCost | None:
        """The pass over the model alone."""
        flops = self.of(config)
        return None if flops is None else flops.cost


def _check_costs(inputs: Inputs, costs: _Costs) -> tuple[PolicyFlops | None, Needs | None]:
    """The run fits the GPUs and its folder can be written; what a micro-batch costs and what a GPU has to hold, None
    where that is not known."""
    config = inputs.config
    flops = costs.of(config)
    needed = None if flops is None else check_fits(config, inputs.model_config, flops.cost)
    check_folder(config.trainer.default_local_dir)
    if flops is not None:
        check_disk(config, flops.cost)
    return flops, needed


def _weights_digest(config: TrainConfig, trains: bool) -> str:
    """Of the weights that the run begins with; they and the prompt table are what DVC has recorded, where it has."""
    settings, known = config.actor_rollout_ref, KnownDigests()
    model = Path(settings.model.path)
    check_recorded([config.data.prompts, model], dvc_hashes(Path(".")), known)
    others = (settings.model.initial_weights, settings.actor.teacher_path) if trains else ()
    denoiser = model / settings.model.transformer_subfolder
    beside = [] if denoiser.name in component_names(model / MODEL_INDEX) else [denoiser]
    beside += [] if settings.model.config_path is None else [Path(settings.model.config_path) / "config.json"]
    return weights_digest([model, *beside, *(Path(folder) for folder in others if folder is not None)], known)


def _check_count(config: TrainConfig, there: int) -> None:
    """There is enough for one iteration."""
    offline = not config.is_online
    file, what = (config.data.pairs, "pairs") if offline else (config.data.prompts, "train prompts")
    if there < config.data.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size is {config.data.train_batch_size} but {file} has only {there} {what}: lower it or "
            f"add {what}"
        )


def _open_pairs(
    config: TrainConfig, embeddings: Embeddings, latent_shape: tuple[int, ...], held_out: set[str]
) -> PairDataset:
    """The pairs fit the model's latents, and their prompts are encoded and none of them is held out.

    Args:
        held_out: uids, also of prompts that validation does not draw.
    """
    pairs = PairDataset.open(config.data.pairs).named_by(load_prompts(config.data.prompts))
    if pairs.latent_shape != tuple(latent_shape):
        raise ConfigError(
            f"{config.data.pairs} holds latents {list(pairs.latent_shape)} but rollout.pipeline height and width make "
            f"{list(latent_shape)}: set them to the size of the pairs' pictures"
        )
    seen = [pair for pair in pairs.pairs if pair.prompt_uid in held_out]
    if seen:
        raise ConfigError(
            f"{config.data.pairs} has pairs of prompts that {config.data.prompts} holds out, pair {seen[0].uid!r} for "
            f"example ({len(seen)} in all): leave them out of the preference table, or make the split of their prompts "
            "another than test"
        )
    missing = [pair for pair in pairs.pairs if pair.prompt_uid not in embeddings]
    if missing:
        raise ConfigError(
            f"{config.data.embeddings} lacks the embedding of the prompt of pair {missing[0].uid!r} ({len(missing)} in "
            "all): put the pairs' prompts into the prompt table and run `dvc repro embeddings`"
        )
    _check_origin(config, pairs, IMAGE_SIDE, "pairs", "data.pairs")
    return pairs


def _check_origin(
    config: TrainConfig, data: PromptEmbeddings | PairDataset, parts: tuple[str, ...], stage: str, field: str
) -> None:
    """What was encoded before was encoded by these parts of this model, and is as it was written.

    Data of older versions cannot be compared, nor can a model that lacks the parts: it is taken, with a warning.
    """
    folder = data.folder
    model, maker = config.actor_rollout_ref.model.path, " and ".join(part.rstrip("*") for part in parts)
    same = made_with(data.model_digest, model, parts)
    if same is False:
        raise ConfigError(
            f"{field} {folder} was made with another {maker} than actor_rollout_ref.model.path {model} has: make "
            f"it with `python -m flows.prepare {stage} --model {model} --out {folder}`, or give the model that made it"
        )
    if data.sha256 is None:
        log.warning(
            "%s %s is of an older version: whether the %s of %s made it, and whether it is whole, is not checked; "
            "`python -m flows.prepare %s` makes it anew",
            *(field, folder, maker, model, stage),
        )
        return
    if same is None:
        log.warning("%s has no %s: whether they made %s %s is not checked", model, maker, field, folder)
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


def check_embeddings(
    config: TrainConfig,
    model_config: DiffusionModelConfig,
    embeddings: PromptEmbeddings,
    field: str = "data.embeddings",
) -> None:
    """They hold what the model needs, and were made as the run expects.

    Args:
        field: that names their folder.

    Raises:
        ConfigError: another model's text encoders made them, or with other settings; or a file is damaged.
    """
    folder = embeddings.folder
    extras = DiffusionModelBase.get_class(model_config).prompt_extras
    lacking = sorted(set(extras) - set(embeddings.extras))
    if lacking:
        raise ConfigError(
            f"{field} {folder} lacks {', '.join(lacking)}: encode the prompts with "
            f"actor_rollout_ref.model.path {config.actor_rollout_ref.model.path}"
        )
    width = text_width(model_config)
    if width not in (None, embeddings.dim):
        raise ConfigError(
            f"{field} {folder} holds vectors of {embeddings.dim} numbers, but the transformer "
            f"of actor_rollout_ref.model.path {config.actor_rollout_ref.model.path} takes {width}: encode the prompts "
            "with it"
        )
    wanted = config.actor_rollout_ref.rollout.pipeline.max_sequence_length
    if wanted not in (None, embeddings.max_sequence_length):
        raise ConfigError(
            f"rollout.pipeline.max_sequence_length is {wanted}, but {folder} was encoded with "
            f"{embeddings.max_sequence_length}: encode the prompts again or leave the field out"
        )
    _check_origin(config, embeddings, TEXT_SIDE, "embeddings", field)
