# SPDX-License-Identifier: Apache-2.0
"""Finished stages of an iteration, kept in the run's folder until a checkpoint and MLflow have the iteration.

A run that was killed then goes on with the stage that it was in: what was sampled is not sampled again, and what was
scored is not scored again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import ray

from tasks.actors.batch_files import write_batch
from tasks.actors.messages import RolloutReply, ask
from tasks.actors.reward_group import Scores
from tasks.actors.rollout_group import PendingBatch, RolloutGroup, by_uid, pending_batch
from tasks.actors.waiting import get
from tasks.data.prompts import Prompt
from tasks.data.rewriting import FIELD, prompts_number
from tasks.records.run_store import SCORES, CheckpointError, CheckpointStore, RunState

TABLE, FIRST_PICTURES = "scores.parquet", "pictures.npy"
VERSION, PROMPTS = "policy_version", "prompts"
# Stateless, so any idle worker of Ray's may do it, near to where the batch is, and Ray repeats it if that one dies. The
# worker that has sampled the batch samples the next one, or sleeps.
_write: Any = ray.remote(num_cpus=0, max_retries=-1)(write_batch)


class KeptStages:
    """The rollouts and scores of a run's latest iterations: each whole, or not there.

    Args:
        folder: is created. Ray's machines must all see it, as they must see the checkpoints.
    """

    def __init__(self, folder: Path):
        self._rollouts = CheckpointStore(folder / "rollout", content="batches")
        self._scores = CheckpointStore(folder / SCORES, content="scores")

    def has_rollout(self, iteration: int) -> bool:
        """Is the iteration's rollout kept?"""
        return iteration in self._rollouts.iterations()

    def has_scores(self, iteration: int) -> bool:
        """Are the iteration's scores kept?"""
        return iteration in self._scores.iterations()

    def check(self, config_digest: str, data_digest: str, after: int) -> None:
        """What is kept of the latest iteration, if it is after that one, is by its record of this config and this data.

        Raises:
            CheckpointError: it is not, or is damaged.
        """
        for store in (self._rollouts, self._scores):
            store.check_newest(config_digest, data_digest, after)

    def keep_rollout(self, state: RunState, version: int, batches: Sequence[PendingBatch]) -> None:
        """Write an iteration's batches, one file each; `version` is the policy's."""

        def write_all(folder: Path) -> None:
            for number, batch in enumerate(batches):  # one at a time, so that one process does it
                file = folder.resolve() / f"{number:04d}.safetensors"
                get(_write.remote(file, batch.trajectories, batch.pictures, batch.latents, batch.finite))

        sampled = prompts_number(prompt for batch in batches for prompt in batch.prompts)
        said: dict[str, float] = {VERSION: version, PROMPTS: sampled}
        self._rollouts.save(replace(state, metrics=said), write_all)

    def rollout(
        self, state: RunState, workers: RolloutGroup, prompts: Sequence[Prompt], n: int
    ) -> tuple[int, list[PendingBatch]] | None:
        """(policy version, batches of `n` samples a prompt, which workers are reading); None where they are not kept.

        Raises:
            CheckpointError: they are damaged, or another config, other data or other prompts made them.
        """
        found = self._rollouts.load(state.iteration, state.config_digest, state.data_digest)
        if found is None:
            return None
        cut, named = workers.batch_keys(prompts, n, state.iteration), by_uid(prompts)
        sampled = prompts_number(named[key.prompt_uid] for keys in cut for key in keys)
        if found[0].metrics.get(PROMPTS, sampled) != sampled:  # of older versions nothing is known
            raise CheckpointError(
                f"{found[1].parent} holds samples of iteration {state.iteration}, but not of the prompts that {FIELD} "
                "gives now: the same iteration and seed must give the same prompts; remove the folder to sample anew"
            )
        files, batches = sorted(found[1].resolve().iterdir()), []
        if len(files) != len(cut):
            raise CheckpointError(
                f"{found[1].parent} holds iteration {state.iteration} in {len(files)} batches, and they are {len(cut)} "
                "now: another rollout.micro_batch_size sampled them; remove the folder to sample anew"
            )
        for number, (keys, file) in enumerate(zip(cut, files, strict=True)):
            worker = number % len(workers.group)
            reply = ask(RolloutReply, workers.group.actors[worker].read, file)
            text = workers.prompt_table([key.prompt_uid for key in keys]).lengths
            batches.append(pending_batch(named, keys, text, reply, workers.recording.outputs, worker))
        return int(found[0].metrics[VERSION]), batches

    def keep_scores(self, state: RunState, version: int, scores: Scores, pictures: Sequence[np.ndarray]) -> None:
        """Write an iteration's scores and its first pictures [H, W, 3]; `version` is the policy's that sampled."""

        def write_all(folder: Path) -> None:
            scores.samples.to_parquet(folder / TABLE, index=False)
            if pictures:
                np.save(folder / FIRST_PICTURES, np.stack(pictures))

        self._scores.save(replace(state, metrics={VERSION: version}), write_all)

    def scores(self, state: RunState, weights: Mapping[str, float]) -> tuple[int, Scores, list[np.ndarray]] | None:
        """(policy version, scores, first pictures [H, W, 3]); None where they are not kept. `weights` is of `Scores`.

        Raises:
            CheckpointError: they are damaged, or another config or other data made them.
        """
        found = self._scores.load(state.iteration, state.config_digest, state.data_digest)
        if found is None:
            return None
        samples = pd.read_parquet(found[1] / TABLE)
        pictures = found[1] / FIRST_PICTURES
        shown = list(np.load(pictures)) if pictures.is_file() else []
        version = int(found[0].metrics[VERSION])
        return version, Scores(samples, weights, dict.fromkeys(weights, 0.0)), shown

    def forget(self, through: int) -> None:
        """Remove what is kept of iterations up to that one."""
        self._rollouts.remove(through)
        self._scores.remove(through)
