# SPDX-License-Identifier: Apache-2.0
"""What can be known to be wrong before any model loads."""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from models.algorithms import check_advantage
from models.cost.flops import PolicyFlops
from models.cost.meta_pass import PassCost
from models.families import load_families
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.schedulers import check_kernel
from models.training.schedules import check_lr_schedule
from models.training.sequence_parallel import check_sequence_split
from models.weights.trainable import check_exported, check_initial_weights
from tasks.actors.reward_model import check_reward_model
from tasks.config.tree import TrainConfig
from tasks.config.unread import told
from tasks.data.base_weights import KnownDigests, check_recorded, weights_digest
from tasks.data.digests import MODEL_INDEX, component_names
from tasks.data.embeddings import Embeddings
from tasks.data.live_embeddings import LiveEmbeddings
from tasks.data.pairs import PairDataset
from tasks.data.prompt_files import NEGATIVE_UID
from tasks.data.prompts import Prompt
from tasks.data.rewriting import get_rewriting
from tasks.records.lineage import dvc_hashes
from tasks.records.second_trackers import check_libraries
from tasks.run.capacity import Needs, check_disk, measure_cost, needs, uncounted_rewards
from tasks.run.data_checks import is_guided, open_data
from tasks.run.early import check_folder, check_home_signs, check_rewards, raising_config_errors
from tasks.run.gpu_capacity import check_fits
from tasks.run.host_check import check_host
from tasks.run.length_checks import check_length
from tasks.run.loss_checks import check_exploration, check_loss
from tasks.run.model_checks import check_engine, check_fitting, check_pipelines, check_stored, check_teacher
from tasks.run.sizes import settle

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What a checked config refers to.

    Attributes:
        pairs: None where samples are made and not read.
        flops: operations of rollout and update; None where the run does not train, or the model cannot be counted.
        needs: what was found to fit a GPU; None where nothing was compared with one.
        host: what was found to fit the machine's memory; None likewise.
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
    host: Needs | None = None
    said: dict[str, str] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)

    def to_encode(self, trains: bool = True) -> list[Prompt]:
        """The texts whose length is looked at before the run, where it encodes them: with that of all prompts that have
        no negative prompt of their own, where something is guided."""
        texts = [*(self.train if trains else []), *self.test]
        if isinstance(self.embeddings, LiveEmbeddings) and is_guided(self.config, self.model_config):
            texts += self.embeddings.prompts([NEGATIVE_UID])
        return texts

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
        check_length(config)
    rollout = config.actor_rollout_ref.rollout
    model_config = DiffusionModelConfig.load(config.actor_rollout_ref.model, rollout.pipeline, rollout.algo)
    adapter = DiffusionModelBase.get_class(model_config)
    check_engine(config, model_config)
    check_stored(model_config, encodes=config.data.encoders is not None)
    check_pipelines(config, model_config, trains)
    check_fitting(config, model_config, trains)
    latent_shape = adapter.latent_shape(model_config)
    if trains:
        check_exploration(config, adapter.build_scheduler(model_config))
    check_teacher(config, adapter, model_config)
    if trains:
        check_initial_weights(adapter, model_config)
    data = open_data(config, model_config, latent_shape, trains)
    inputs = Inputs(model_config=model_config, config=config, **data._asdict())
    sharing = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    check_sequence_split(model_config, sharing, inputs.embeddings.max_sequence_length)
    costs = _Costs(inputs)
    found = settle(config, model_config, costs.of_pass, recorded, trains)
    inputs = replace(inputs, config=found.config, said=found.said, kept=found.kept)
    inputs = _with_costs(inputs, costs) if trains else inputs
    if trains and (unread := told(config)) is not None:
        log.warning(unread)
    if (uncounted := uncounted_rewards(config)) is not None:
        log.warning(uncounted)
    return replace(inputs, digest=f"{inputs.digest}-{_weights_digest(config, trains)}")


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
    check_rewards(config)
    if config.data.rewrite_prompts is not None:
        get_rewriting(config.data.rewrite_prompts)
    check_reward_model(config.reward)


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


def _with_costs(inputs: Inputs, costs: _Costs) -> Inputs:
    """The same with what a micro-batch costs and what the run needs of a GPU and of its machine, where that is known.
    The run fits both, and its folder can be written and has room."""
    config, flops = inputs.config, costs.of(inputs.config)
    if flops is not None:
        fitting = check_fits(config, inputs.model_config, flops.cost)
        needed = fitting or needs(config, inputs.model_config, flops.cost)
        inputs = replace(inputs, flops=flops, needs=fitting, host=check_host(config, needed))
    check_folder(config.trainer.default_local_dir)
    if flops is not None:
        check_disk(config, flops.cost)
    return inputs


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
