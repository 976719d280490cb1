# SPDX-License-Identifier: Apache-2.0
"""A run that samples an iteration ahead keeps to its schedule, undisturbed and killed."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PICTURES, RolloutRequest
from models.schedulers import NoiseKey
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tasks.config.recipes import load_recipe, parse_changes
from tasks.data.embeddings import prompt_table
from tasks.rewards.jpeg import JpegIncompressibility
from tasks.run.preflight import check_inputs
from tasks.run.training import TrainingRun
from tasks.stages.advantage import compute_advantage
from tests.platform.test_resume import final_weights, history, resume, start_and_kill
from tests.support.helpers import single_rank
from tests.support.platform_helpers import RayHead, Workspace, make_workspace

ITERATIONS = 5
SETTINGS = (
    f"trainer.total_training_steps={ITERATIONS}",
    "trainer.one_step_off_policy=true",
    "trainer.val_before_train=false",
    "trainer.test_freq=3",
    "actor_rollout_ref.rollout.weight_transport=collective",
)


def by_hand(lag: int) -> dict[str, Tensor]:
    """The final weights of one process that samples iteration i with the weights of max(i - 1 - lag, 0)."""
    config = load_recipe("tiny").with_changes(parse_changes(list(SETTINGS)))
    inputs = check_inputs(config)
    schedule = TrainingRun(config, inputs, *[None] * 6)  # type: ignore[arg-type]
    rollout = DiffusersRolloutEngine(inputs.model_config)
    with single_rank():
        trainer = DiffusersFSDPEngine(inputs.model_config, config.actor_rollout_ref.actor)
        trainer.initialize()
        weights = [trainer.gather_weights()]
        for iteration in range(1, ITERATIONS + 1):
            rollout.load_weights(weights[max(iteration - 1 - lag, 0)])
            trainer.update_policy(sampled(schedule, rollout, iteration))
            weights.append(trainer.gather_weights())
    return weights[-1]


def sampled(schedule: TrainingRun, rollout: DiffusersRolloutEngine, iteration: int) -> list[ActorBatch]:
    """Two optimiser steps of two batches of one prompt each."""
    paths, rewards, uids = [], [], []
    for prompt in schedule.prompts(iteration):
        request = RolloutRequest(
            keys=tuple(NoiseKey(0, iteration, prompt.uid, index) for index in range(4)),
            prompts=prompt_table(schedule.inputs.embeddings, [prompt.uid], needs_negative=False),
            prompt_index=torch.zeros(4, dtype=torch.long),
            window=tuple(schedule.windows(iteration)[prompt.uid]),
            outputs=frozenset({PICTURES}),
        )
        pictures, trajectories = rollout.generate(request)
        paths.append(trajectories)
        rewards.append(torch.from_numpy(JpegIncompressibility().score(pictures.numpy(), []).scores))
        uids += [prompt.uid] * 4
    data: dict[str, Any] = {"sample_level_rewards": torch.cat(rewards).numpy(), "uid": uids}
    advantages = torch.from_numpy(compute_advantage(data, "flow_grpo")["advantages"]).split(4)
    parts = list(zip(paths, advantages, strict=True))
    return [ActorBatch(parts[:2], 8), ActorBatch(parts[2:], 8)]


@pytest.mark.slow
def test_sampling_ahead_keeps_its_schedule_and_resumes(
    tmp_path: Path,
    prepared: Path,
    prefect_server: dict[str, str],
    ray_head: RayHead,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed with two iterations in the weights, so that those of the iteration before are no longer the first ones."""
    undisturbed, killed = (
        make_workspace(tmp_path / name, prepared, prefect_server).on(ray_head) for name in ("undisturbed", "killed")
    )
    undisturbed.train(*SETTINGS)

    monkeypatch.chdir(undisturbed.folder)
    expected, sequential, found = by_hand(lag=1), by_hand(lag=0), final_weights(undisturbed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not all(torch.equal(found[name], sequential[name]) for name in expected)

    assert history(undisturbed)["rollout/policy_lag"] == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert sampled_by(undisturbed) == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    (run,) = undisturbed.mlflow_runs()
    waited = undisturbed.client().get_metric_history(run.info.run_id, "timing_s/gen_ahead")
    assert [point.step for point in waited] == [1, 2, 3, 4], "nothing is sampled for an iteration after the last"

    start_and_kill(killed, SETTINGS, reached="iter_000002")
    resume(killed, SETTINGS, undisturbed)
    assert sampled_by(killed) == sampled_by(undisturbed)


def sampled_by(workspace: Workspace) -> dict[int, int]:
    """Iteration -> the iteration whose weights sampled it, as recorded."""
    (run,) = workspace.mlflow_runs()
    client, versions = workspace.client(), {}
    for iteration in range(1, ITERATIONS + 1):
        path = client.download_artifacts(run.info.run_id, f"samples/{iteration:06d}.parquet")
        (versions[iteration],) = set(pd.read_parquet(path)["policy_version"])
    return versions
