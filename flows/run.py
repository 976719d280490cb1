"""A training run's long-lived parts: actors, tracker, checkpoints, and what it remembers between iterations."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray

from flows.checks import Inputs
from flows.config import TrainConfig
from models.algorithms import get_diffusion_loss_fn, needs_old_means
from models.engines.canary import Canary
from models.engines.ema import HeldWeights
from models.schedulers.windows import window_steps
from tasks.checkpoint import CheckpointError, CheckpointStore, RunState
from tasks.cluster import require_gpus
from tasks.dataset import Prompt
from tasks.pairs import SIDES, Pair
from tasks.reward import RewardGroup
from tasks.rollout import RolloutGroup
from tasks.tracking import Tracker, lineage_tags
from tasks.update import TrainerGroup
from tasks.validate import Validation

T = TypeVar("T")
CANARY_PROMPTS = 2
CUDA_CANARY_TOLERANCE = 0.01


@dataclass
class TrainingRun:
    """Everything `flows.train` works with.

    Attributes:
        config, inputs: what was asked for.
        rollout, reward, trainer: the actor groups; the first two are None where `sample_source` is offline.
        tracker: the MLflow run.
        store: the checkpoints.
        canary: the input that proves a weight sync; None where there is nothing to sync to.
        iteration: the last one that is in the weights.
        held_out: the last held-out reward that was measured.
    """

    config: TrainConfig
    inputs: Inputs
    rollout: RolloutGroup | None
    reward: RewardGroup | None
    trainer: TrainerGroup
    tracker: Tracker
    store: CheckpointStore
    canary: Canary | None
    iteration: int = 0
    held_out: float = float("nan")

    @property
    def samples(self) -> bool:
        """Does the run sample? Offline it reads pairs, and neither syncs nor validates."""
        return self.rollout is not None

    @property
    def sampling_weights(self) -> HeldWeights:
        """Which of the trainer's weights the rollout samples with."""
        loss = get_diffusion_loss_fn(self.config.actor_rollout_ref.actor.diffusion_loss.loss_mode)
        return "old" if loss.samples_from_old_policy else "policy"

    def prompts(self, iteration: int) -> list[Prompt]:
        """The iteration's train prompts."""
        return self._part(self.inputs.train, iteration)

    def pairs(self, iteration: int) -> list[Pair]:
        """The iteration's preference pairs."""
        return self._part(self.inputs.pairs.pairs, iteration)

    def _part(self, items: Sequence[T], iteration: int) -> list[T]:
        """Consecutive parts of one permutation an epoch, the remainder left out.

        A function of (seed, iteration) alone, so there is no cursor to lose.
        """
        size = self.config.data.train_batch_size
        epoch, part = divmod(iteration - 1, len(items) // size)
        order = list(items)
        random.Random(f"data/{self.config.trainer.seed}/{epoch}").shuffle(order)
        return order[part * size : (part + 1) * size]

    def window(self, iteration: int) -> list[int]:
        """The iteration's stochastic steps; none where finished samples are trained on."""
        rollout = self.config.actor_rollout_ref.rollout
        trainer = self.config.trainer
        if self.config.algorithm.trainer_type == "direct_preference":
            return []
        return window_steps(
            rollout.algo,
            rollout.pipeline.num_inference_steps,
            trainer.seed,
            iteration,
            trainer.total_training_steps,
        )

    @property
    def tolerance(self) -> float:
        """Largest canary difference allowed."""
        given = self.config.trainer.canary_tolerance
        return given if given is not None else (0.0 if self.config.trainer.device == "cpu" else CUDA_CANARY_TOLERANCE)

    def keep_validation(self, result: Validation) -> None:
        """Remember the held-out reward, and the pictures of this iteration in the run's folder."""
        self.held_out = result.reward
        folder = self.config.run_dir / "validation"
        folder.mkdir(exist_ok=True)
        result.sheet.save(folder / f"{self.iteration:06d}.png")

    def validation_pictures(self) -> dict[int, Path]:
        """Iteration -> grid of held-out pictures."""
        return {int(path.stem): path for path in (self.config.run_dir / "validation").glob("*.png")}

    def state(self) -> RunState:
        """The record of a checkpoint of now."""
        return RunState(self.iteration, self.config.digest(), self.inputs.digest, self.tracker.run_id)

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        found = self.store.latest(self.config.digest(), self.inputs.digest)
        if found is None:
            return
        state, weights = found
        self.trainer.load(weights)
        self.iteration = state.iteration


@contextmanager
def open_run(config: TrainConfig, inputs: Inputs) -> Iterator[TrainingRun]:
    """Start the actors and the tracker; afterwards the MLflow run is FINISHED, FAILED or KILLED, never RUNNING."""
    store = CheckpointStore(config.run_dir / "checkpoints", config.trainer.max_actor_ckpt_to_keep)
    if config.trainer.resume_mode == "disable" and store.iterations():
        raise CheckpointError(
            f"{config.run_dir} has checkpoints and trainer.resume_mode is disable: use auto or another "
            "trainer.experiment_name"
        )
    tracker = Tracker(config.tracking, config.run_name, _remembered_run_id(config))
    with tracker.concluded():
        _remember_run_id(config, tracker.run_id)
        run = _start_actors(config, inputs, tracker, store)
        tracker.log_start(config.model_dump(mode="json"), lineage_tags() | reward_tags(run.reward))
        run.resume()
        yield run


def start_rollout(config: TrainConfig, inputs: Inputs) -> RolloutGroup:
    """The rollout workers of a config; their models load in the background."""
    settings = config.actor_rollout_ref.rollout
    loss = config.actor_rollout_ref.actor.diffusion_loss.loss_mode
    return RolloutGroup(
        inputs.model_config,
        inputs.embeddings,
        count=settings.num_actors,
        num_gpus=settings.num_gpus_per_actor if config.trainer.device == "cuda" else 0,
        device=config.trainer.device,
        num_threads=settings.num_threads,
        micro_batch_size=settings.micro_batch_size,
        seed=config.trainer.seed,
        record_means=config.algorithm.rollout_correction.bypass_mode and needs_old_means(loss),
        record_finished=config.algorithm.trainer_type == "direct_preference",
    )


def _start_actors(config: TrainConfig, inputs: Inputs, tracker: Tracker, store: CheckpointStore) -> TrainingRun:
    """All groups load their models at the same time."""
    settings, trainer_settings = config.actor_rollout_ref, config.trainer
    online = config.algorithm.sample_source == "online"
    if trainer_settings.device == "cuda":
        rollout_gpus = settings.rollout.num_actors * settings.rollout.num_gpus_per_actor if online else 0
        require_gpus(trainer_settings.world_size + rollout_gpus)
    rollout, reward = (start_rollout(config, inputs), RewardGroup(config.reward)) if online else (None, None)
    per_prompt = settings.rollout.n if online else len(SIDES)
    trainer = TrainerGroup(
        inputs.model_config,
        settings.actor,
        config.algorithm,
        world_size=trainer_settings.world_size,
        device=trainer_settings.device,
        num_threads=trainer_settings.num_threads,
        mini_batch_samples=settings.actor.ppo_mini_batch_size * per_prompt,
    )
    started = trainer.start()
    canary = None
    if rollout is not None:
        rollout.group.call_all("ready")
        canary = Canary(rollout.prompt_table([prompt.uid for prompt in inputs.test[:CANARY_PROMPTS]]))
    ray.get(started)
    return TrainingRun(config, inputs, rollout, reward, trainer, tracker, store, canary)


def reward_tags(reward: RewardGroup | None) -> dict[str, str]:
    """Name and version of every reward, as tags of the run."""
    if reward is None:
        return {}
    return {f"reward.{name.replace(':', '/')}": version for name, version in reward.versions().items()}


def _remembered_run_id(config: TrainConfig) -> str | None:
    record = config.run_dir / "run.json"
    return json.loads(record.read_text())["mlflow_run_id"] if record.is_file() else None


def _remember_run_id(config: TrainConfig, run_id: str) -> None:
    """Written aside and renamed: a run killed here has the old record or the new one."""
    record = {"mlflow_run_id": run_id, "run_name": config.run_name, "config": config.model_dump(mode="json")}
    aside = config.run_dir / ".run.json"
    aside.write_text(json.dumps(record, indent=1))
    os.replace(aside, config.run_dir / "run.json")
