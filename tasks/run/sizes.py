# SPDX-License-Identifier: Apache-2.0
"""What `auto` stands for: how many samples are computed together, and whether the rollout sleeps.

Other sizes give the same samples and gradients up to rounding. So a number is found once, at the run's first start, and
every later start has it from the run's record, on whatever machine. Sleeping changes no number: it is decided at every
start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from models.algorithms import get_diffusion_loss_fn
from models.config.section import AUTO
from models.cost.memory import GIB
from models.cost.meta_pass import PassCost
from models.families.base import DiffusionModelConfig
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.data.pairs import SIDES
from tasks.run.capacity import Needs, needs, samplers_on_a_gpu
from tasks.run.gpu_capacity import gpu_gib, shortfall
from tasks.system.host_memory import free_bytes

ROLLOUT, UPDATE, SLEEP = "rollout.micro_batch_size", "actor.ppo_micro_batch_size_per_gpu", "rollout.enable_sleep_mode"
KEPT_FREE = {"cuda": 0.15, "cpu": 0.5}
"""Share of the memory that an estimate leaves alone. On a GPU contexts, NCCL and fragments; on the CPU Ray's object
store, the driver, and the processes themselves."""
BATCHES_EACH = 2
"""Batches of an iteration for each worker, at least: the first is scored while the second is sampled."""

Measure = Callable[[TrainConfig], PassCost | None]


@dataclass(frozen=True)
class Settled:
    """A config with nothing left to find out.

    Attributes:
        config: names the same run as the one with auto.
        said: field that was auto -> its value, and why.
        kept: field that was auto -> its value, of which the run's first start said why.
    """

    config: TrainConfig
    said: dict[str, str]
    kept: dict[str, int]


def settle(
    config: TrainConfig,
    model_config: DiffusionModelConfig,
    measure: Measure,
    recorded: TrainConfig | None = None,
    trains: bool = True,
) -> Settled:
    """Put values in the place of auto.

    Args:
        measure: what a micro-batch costs; None where the model cannot be counted.
        recorded: the config of the run's first start.
        trains: a trainer is to have room, too; without, the rollout has the GPU alone.

    Raises:
        ConfigError: the memory, or what the run takes of it, is not known; or nothing fits.
    """
    said: dict[str, str] = {}
    kept: dict[str, int] = {}
    for fields in _together(config, trains):
        before = None if recorded is None else _value(recorded, fields[0])
        if isinstance(before, int):
            config = _as_before(config, fields, before)
            kept |= dict.fromkeys(fields, before)
            continue
        chosen, why = _largest(config, fields, model_config, measure, trains)
        config = _with(config, fields, chosen)
        said |= dict.fromkeys(fields, f"{chosen}: {why}")
    if _samples(config, trains) and _value(config, SLEEP) == AUTO:
        sleeps, why = _must_sleep(config, model_config, measure) if trains else (False, "no update takes turns with it")
        config = _with(config, (SLEEP,), sleeps)
        said[SLEEP] = f"{str(sleeps).lower()}: {why}"
    return Settled(config, said, kept)


def batch_sizes(config: TrainConfig) -> list[int]:
    """What `rollout.micro_batch_size` may be, ascending: the config's checks hold, and every worker has work.

    Of an offline run, which only a measurement samples, as many together as the update may have.
    """
    rollout, algorithm, n = config.actor_rollout_ref.rollout, config.algorithm, config.actor_rollout_ref.rollout.n
    total, workers = config.data.train_batch_size * _per_prompt(config), rollout.num_actors
    sizes = _divisors(_share(config))
    if rollout.algo.sde_window_per == "prompt":
        sizes = [size for size in sizes if n % size == 0]
    if algorithm.trainer_type == "direct_preference" and algorithm.paired_preference:
        sizes = [size for size in sizes if size % _per_prompt(config) == 0]
    if config.trainer.one_step_off_policy:
        sizes = [size for size in sizes if -(-total // size) <= workers * rollout.max_queued_batches]
    for each in range(BATCHES_EACH, 0, -1):
        busy = [size for size in sizes if size * workers * each <= total]
        if busy:
            return busy
    return sizes


def update_sizes(config: TrainConfig) -> list[int]:
    """What `actor.ppo_micro_batch_size_per_gpu` may be beside a known `rollout.micro_batch_size`, ascending."""
    algorithm = config.algorithm
    whole = config.actor_rollout_ref.rollout.batch_size if _replays(config) else _share(config)
    pairs = algorithm.trainer_type == "direct_preference" and algorithm.paired_preference
    return [size for size in _divisors(whole) if size % 2 == 0 or not pairs]


def _together(config: TrainConfig, trains: bool) -> list[tuple[str, ...]]:
    """The sizes that are auto, those that are to be one number as one."""
    wanted = [name for name in (UPDATE, ROLLOUT) if _value(config, name) == AUTO]
    if not trains:
        return [tuple(wanted)] if ROLLOUT in wanted else []
    if not config.is_online:
        return [(UPDATE,)] if UPDATE in wanted else []
    return [tuple(wanted)] if len(wanted) == 2 and _replays(config) else [(name,) for name in wanted]


def _samples(config: TrainConfig, trains: bool) -> bool:
    """Does the command start a rollout? Offline training does not; a measurement does for any recipe."""
    return config.is_online or not trains


def _replays(config: TrainConfig) -> bool:
    """Does the update repeat log-probs of the rollout, which it does to the last bit only with batches of one size?"""
    loss = config.actor_rollout_ref.actor.diffusion_loss
    reverse = get_diffusion_loss_fn(loss.loss_mode, loss.options).process == "reverse"
    return config.is_online and reverse and config.algorithm.rollout_correction.bypass_mode


def _candidates(config: TrainConfig, fields: Sequence[str]) -> list[int]:
    if ROLLOUT not in fields:
        return update_sizes(config)
    sizes, update = batch_sizes(config), _value(config, UPDATE)
    return [size for size in sizes if size <= update] if update != AUTO and _replays(config) else sizes


def _largest(
    config: TrainConfig, fields: Sequence[str], model_config: DiffusionModelConfig, measure: Measure, trains: bool
) -> tuple[int, str]:
    """The largest size that fits, by as few passes over the model as a search needs, and why."""
    names, sizes = " and ".join(fields), _candidates(config, fields)
    if not sizes:
        raise ConfigError(f"{names} is auto, but no number goes with the other sizes of the run: give one")
    room = _room(config, names)
    lacking: dict[int, str | None] = {}

    def fits(size: int) -> bool:
        trial = _with(config, fields, size)
        if _value(trial, ROLLOUT) == AUTO and trial.is_online:
            trial = _with(trial, (ROLLOUT,), batch_sizes(trial)[0])
        lacking[size] = room.shortfall(trial, _needs(trial, model_config, measure, names, trains), trains)
        return lacking[size] is None

    if fits(sizes[-1]):
        return sizes[-1], f"the largest that goes with the run's other sizes; it fits into {room.sentence}"
    low, high = -1, len(sizes) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    if low < 0:
        raise ConfigError(f"{names} is auto, but {sizes[0]} already does not fit: {lacking[sizes[0]]}")
    beyond, _, _ = str(lacking[sizes[high]]).partition(":")
    return sizes[low], f"the largest that fits into {room.sentence}; with {sizes[high]} {beyond}"


def _must_sleep(config: TrainConfig, model_config: DiffusionModelConfig, measure: Measure) -> tuple[bool, str]:
    if not config.shares_gpus:
        return False, "trainer and rollout share no GPU"
    room = _room(config, SLEEP)
    update, rollout, *_ = room.widened(_needs(config, model_config, measure, SLEEP)).beside_what_stays(config)
    both = update.gib + (0.0 if rollout is None else rollout.gib)
    sleeps = both > room.usable
    fit = "do not fit" if sleeps else "fit"
    return sleeps, f"update and rollout together take {both:.1f} GiB, which {fit} into {room.sentence}"


def _needs(
    config: TrainConfig, model_config: DiffusionModelConfig, measure: Measure, names: str, trains: bool = True
) -> Needs:
    cost = measure(config)
    if cost is None:
        raise ConfigError(f"{names} is auto, but what this model's transformer takes cannot be counted: give a value")
    return needs(config, model_config, cost, _samples(config, trains))


@dataclass(frozen=True)
class Room:
    """Memory of a GPU, or of the machine.

    Attributes:
        there: GiB in all.
    """

    device: str
    there: float

    @property
    def usable(self) -> float:
        """GiB that an estimate may come to."""
        return (1 - KEPT_FREE[self.device]) * self.there

    @property
    def sentence(self) -> str:
        """Where it must fit."""
        what = "a GPU's" if self.device == "cuda" else "the machine's free"
        return f"{self.usable:.1f} GiB, which leaves the rest of {what} {self.there:.1f} free"

    def widened(self, needed: Needs) -> Needs:
        """With what a rollout worker's process keeps on a GPU beyond what is counted."""
        if needed.rollout is None or self.device == "cpu":
            return needed
        return needed._replace(rollout=needed.rollout.with_kept(needed.kept))

    def shortfall(self, config: TrainConfig, needed: Needs, trains: bool) -> str | None:
        """What does not fit; None where all does."""
        update, rollout, *_ = needed = self.widened(needed)
        if self.device == "cuda" and trains:
            return shortfall(config, needed, self.usable)
        trainer, settings = config.trainer, config.actor_rollout_ref.rollout
        workers = samplers_on_a_gpu(config) if self.device == "cuda" else -(-settings.num_actors // trainer.nnodes)
        both = trainer.n_gpus_per_node * update.gib if trains else 0.0
        both += 0.0 if rollout is None else workers * rollout.gib
        both += (needed.rewards + needed.encoders) / GIB if config.shares_gpus else 0.0  # of both beside the rollout
        where = "on each GPU" if self.device == "cuda" else "on each machine"
        if both <= self.usable:
            return None
        return f"the processes need {both:.1f} GiB {where} but there are {self.usable:.1f}"


def _room(config: TrainConfig, names: str) -> Room:
    if config.trainer.device == "cpu":
        return Room("cpu", free_bytes() / GIB)
    there = gpu_gib(config)
    if there is None:
        raise ConfigError(
            f"{names} is auto, but the driver sees no GPU and trainer.gpu_memory_gib is null: give a value, or say "
            "with trainer.gpu_memory_gib how much memory a GPU has"
        )
    return Room("cuda", there)


def _share(config: TrainConfig) -> int:
    """Samples of a rank in an optimiser step."""
    return config.actor_rollout_ref.actor.ppo_mini_batch_size * _per_prompt(config) // config.data_ranks


def _per_prompt(config: TrainConfig) -> int:
    """Samples of an iteration for each of its prompts; offline, of each pair."""
    return config.actor_rollout_ref.rollout.n if config.is_online else len(SIDES)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _value(config: TrainConfig, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(config.actor_rollout_ref, section), field)


def _as_before(config: TrainConfig, names: Sequence[str], value: int) -> TrainConfig:
    """With the value of the run's first start, by which its kept samples are cut.

    Raises:
        ConfigError: it does not go with what may be another now, as the number of trainer ranks.
    """
    try:
        return _with(config, names, value)
    except ConfigError as error:
        raise ConfigError(
            f"{' and '.join(names)} is auto, and was {value} at the run's first start, which does not go with what is "
            f"given now ({error}): go on with as many trainer ranks and rollout workers as then"
        ) from error


def _with(config: TrainConfig, names: Sequence[str], value: int | bool) -> TrainConfig:
    sections: dict[str, dict[str, Any]] = {}
    for name in names:
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    return config.settled({"actor_rollout_ref": sections})
