# SPDX-License-Identifier: Apache-2.0
"""Whether the model can be sampled, trained and taught as a run's settings ask."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from models.config.exported import LORA_FILE, TRANSFORMER
from models.families.base import DiffusionModelBase, DiffusionModelConfig, read_architecture
from models.rollout.vllm_omni.engine import check_tensor_split, pipeline_class
from models.runtime.projections import not_fused
from models.training.engine import TRAINING_ENGINES, get_training_engine
from models.weights.fitting import check_network, check_text_encoders
from models.weights.stored import stored_shapes, variant_alone
from models.weights.trainable import check_lora_fits, with_lora_of
from tasks.actors.interpreter import check_interpreter
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.data.digests import MODEL_INDEX, component_names


def check_engine(config: TrainConfig, model_config: DiffusionModelConfig) -> None:
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


def check_stored(model_config: DiffusionModelConfig, encodes: bool) -> None:
    """The files of the components that a run loads are whole, by their headers; those that a library alone can read are
    left.

    Args:
        encodes: it loads the text encoders, too, which may be missing where their embeddings are on disk.
    """
    model = Path(model_config.path)
    named = component_names(model / MODEL_INDEX)
    loaded = {name for name in named if encodes or not name.startswith("text_encoder")}
    for name in sorted({*loaded, model_config.transformer_subfolder}):
        stored_shapes(model / name, f"model.path is {model}")
        if (alone := variant_alone(model / name)) is not None:
            raise ConfigError(
                f"model.path is {model}, whose {name} has its weights in a variant alone ({alone}): fetch those "
                "without one, or save the model anew without a variant"
            )


def check_fitting(config: TrainConfig, model_config: DiffusionModelConfig, trains: bool) -> None:
    """The weights that the run loads are those that the configs beside them ask for; one of an adapter that loads them
    in a way of its own is left.

    Args:
        trains: false where weights are only sampled from.
    """
    adapter, given = DiffusionModelBase.get_class(model_config), f"model.path is {model_config.path}"
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    # Another engine than diffusers reads them itself; what is trained is loaded by diffusers where it is exported.
    if (trains or rollout.name == "diffusers") and _loads_as_all(adapter, "load_transformer"):
        check_network(model_config.path, model_config.transformer_subfolder, given, model.config_path)
    if (not trains or config.is_online) and _loads_as_all(adapter, "load_vae"):
        check_network(model_config.path, "vae", given)
    if config.data.encoders is not None and _loads_as_all(adapter, "load_text_pipeline"):
        check_text_encoders(model_config.path, given)


def _loads_as_all(adapter: type[DiffusionModelBase], method: str) -> bool:
    own = getattr(adapter, method)
    return getattr(own, "__func__", own) is getattr(DiffusionModelBase, method).__func__


def check_pipelines(config: TrainConfig, model_config: DiffusionModelConfig, trains: bool) -> None:
    """The model can be sampled as the run's and the validation's pipeline ask, by the engine that is to do it."""
    rollout, adapter = config.actor_rollout_ref.rollout, DiffusionModelBase.get_class(model_config)
    for pipeline in (rollout.pipeline, rollout.validation_pipeline()):
        asked = replace(model_config, pipeline=pipeline)
        adapter.check_pipeline(asked)
        _check_schedule(adapter, asked)
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


def _check_schedule(adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig) -> None:
    """The noise levels are numbers: a schedule that is stretched to a last level (Qwen-Image) has none for one step."""
    with np.errstate(invalid="ignore"):
        levels = adapter.build_scheduler(model_config).sigmas
    if not levels.isfinite().all():
        raise ConfigError(
            f"the scheduler of {model_config.path} gives the noise levels {levels.tolist()} for num_inference_steps "
            f"{model_config.pipeline.num_inference_steps}: take more steps"
        )


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


def check_teacher(config: TrainConfig, adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig) -> None:
    """The teacher, where there is one, is of the same family and its files are whole; LoRA weights are of the same
    model, of any rank."""
    path = config.actor_rollout_ref.actor.teacher_path
    if path is None:
        return
    given = f"actor.teacher_path is {path}"
    if (file := Path(path) / LORA_FILE).is_file():
        check_lora_fits(adapter, with_lora_of(model_config, file, given), file, given)
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
    stored_shapes(Path(path) / TRANSFORMER, given)
    if _loads_as_all(adapter, "load_transformer"):
        check_network(path, TRANSFORMER, given)
