# SPDX-License-Identifier: Apache-2.0
"""Samples that are not finite on their whole way, on a real Ray: drawn, kept, scored and trained on, or rather not."""

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from models.samples.file import read_samples, write_samples
from models.samples.trajectories import FINITE, RolloutRequest
from tasks.actors.reward_group import RewardGroup, Scores
from tasks.actors.reward_pool import RewardFailure
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.rollout_worker import RolloutWorker
from tasks.actors.update_plan import NothingToLearn
from tasks.config.algorithm import DiffusionAlgoConfig
from tasks.config.reward import RewardConfig
from tasks.records.run_store import RunState
from tasks.run.kept_stages import KeptStages
from tasks.stages.advantage import advantage, alike, compute_advantage
from tasks.stages.validation import draw_and_score
from tasks.system.stopwatch import Stopwatch
from tests.support.weight_actors import PROMPTS, Actors, started

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import it
REWARD = "tests.support.unreliable_rewards:fails_before"
N, WINDOW = 4, (0,)
COUNTED = ("val/reward/missing", "val/reward/light/missing", "val/rollout/not_finite")


@pytest.fixture(scope="module")
def actors(shared_forks: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actors]:
    """One rank and one worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # where the workers find the rewards of these tests
        with started(tiny_model, tmp_path_factory.mktemp("embeddings"), ranks=1, workers=1) as made:
            yield made


def reward_group(folder: Path, max_missing_fraction: float = 1.0) -> RewardGroup:
    """One reward, which writes in `folder` that it was called."""
    entry = {"reward": REWARD, "options": {"folder": str(folder), "attempts": 0}}
    return RewardGroup(RewardConfig(functions={"light": entry}, max_missing_fraction=max_missing_fraction))


def with_one_spoilt(rollout: RolloutGroup, spoilt: tuple[str, int]) -> RolloutGroup:
    """The same workers, but one sample, by prompt and index, is given a text of NaN."""
    group: Any = copy.copy(rollout)

    def request(keys: Any, *rest: Any) -> RolloutRequest:
        made = rollout._request(keys, *rest)
        table, index = made.prompts, made.prompt_index.clone()
        index[[(key.prompt_uid, key.sample_index) == spoilt for key in keys]] = len(table.prompt_embeds)
        text = torch.cat([table.prompt_embeds, torch.full_like(table.prompt_embeds[:1], torch.nan)])
        mask = torch.cat([table.prompt_embeds_mask, table.prompt_embeds_mask[:1]])
        table = replace(table, prompt_embeds=text, prompt_embeds_mask=mask)
        return replace(made, prompts=table, prompt_index=index)

    group._request = request
    return group


def scored(rollout: RolloutGroup, reward: RewardGroup) -> tuple[list, Scores]:
    batches = rollout.submit(PROMPTS, N, 1, WINDOW)
    return batches, reward.table(batches, reward.submit(batches, training=True))


def test_one_of_an_iteration_leaves_the_others_as_they_were(actors: Actors, tmp_path: Path) -> None:
    """Their scores, and what the missing one's group makes of them; also from disk. The update then is finite."""
    reward, gone = reward_group(tmp_path), 2
    group = with_one_spoilt(actors.rollout, ("uid-0", gone))
    sound, (batches, found) = scored(actors.rollout, reward)[1], scored(group, reward)
    kept = [number for number in range(2 * N) if number != gone]
    assert np.flatnonzero(~found.finite).tolist() == np.flatnonzero(np.isnan(found.rewards)).tolist() == [gone]
    assert found.rewards[kept].tolist() == sound.rewards[kept].tolist()
    assert found.metrics()["rollout/not_finite"] == found.metrics()["reward/light/missing"] == 1
    statistics = found.samples.filter(regex="image/(?!diversity)")
    assert statistics.loc[kept].equals(sound.samples[statistics.columns].loc[kept])

    config, data = DiffusionAlgoConfig(), {"uid": sound.uids, "sample_level_rewards": sound.rewards.copy()}
    data["sample_level_rewards"][gone] = np.nan
    advantages, _ = advantage.fn(Stopwatch(), found, config)
    np.testing.assert_array_equal(advantages, compute_advantage(data, "flow_grpo", config=config)["advantages"])
    assert np.isnan(alike(found)).tolist() == np.isnan(advantages).tolist()
    assert (alike(found)[kept] == 0).all()

    state, stages = RunState(1, "a", "b", "c"), KeptStages(tmp_path)
    stages.keep_rollout(state, 7, batches)
    version, again = stages.rollout(state, actors.rollout, PROMPTS, N)
    assert version == 7, "the policy that sampled, whichever iteration it is"
    read = reward.table(again, reward.submit(again, training=True))
    assert read.samples.equals(found.samples)
    stages.keep_scores(state, 0, found, [])
    assert stages.scores(state, found.weights)[1].metrics()["rollout/not_finite"] == 1
    metrics = actors.trainer.update(again, advantages, None)
    assert metrics["optimizer_steps"] > 0
    assert np.isfinite(metrics["grad_norm"])


def test_a_file_of_an_older_version_says_nothing_and_is_read(actors: Actors, tmp_path: Path) -> None:
    """A run that was killed goes on with it as that version would have."""
    batches, _ = scored(actors.rollout, reward_group(tmp_path))
    samples, outputs = ray.get(batches[0].trajectories), {"pictures": torch.tensor(ray.get(batches[0].pictures))}
    file = tmp_path / "batch.safetensors"
    write_samples(file, samples, outputs)
    assert FINITE not in read_samples(file)[1]
    assert RolloutWorker.__new__(RolloutWorker).read(file).finite.tolist() == [True] * len(samples)


def test_a_weight_that_is_nan_leaves_every_sample_missing_and_asks_no_reward(actors: Actors, tmp_path: Path) -> None:
    """In an iteration as in a validation, which is as where every score failed."""
    group = actors.rollout.group

    def spoil(worker: Any, number: float | None) -> float:
        weight = next(worker.engine.transformer.parameters()).data.view(-1)
        before = float(weight[0])
        weight[0] = number
        return before

    (before,) = group.call_all("__ray_call__", spoil, torch.nan)
    try:
        _, found = scored(actors.rollout, reward_group(tmp_path))
        assert np.isnan(found.rewards).all()
        assert found.metrics()["rollout/not_finite"] == 2 * N
        with pytest.raises(NothingToLearn, match=r"every reward .* is missing \(light: 8 of 8 missing\)"):
            advantage.fn(Stopwatch(), found, DiffusionAlgoConfig())
        with pytest.raises(NothingToLearn, match="no sample of the iteration is finite"):
            alike(found)

        def validated(limit: float) -> dict[str, float]:
            reward, pipeline = reward_group(tmp_path, limit), actors.rollout.pipeline
            return draw_and_score.fn(Stopwatch(), actors.rollout, reward, PROMPTS, 1, pipeline).metrics()

        assert validated(1.0) == dict.fromkeys(COUNTED, 2.0)
        with pytest.raises(RewardFailure, match=r"'light' is missing for 2 of 2 .*: the sample is not finite"):
            validated(0.5)
        assert not (tmp_path / "calls").exists()
    finally:
        group.call_all("__ray_call__", spoil, before)
