# SPDX-License-Identifier: Apache-2.0
"""What a trainer rank makes of a batch that it is given, and which of its weights leave it. Without Ray."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.config.actor import ForwardProcessConfig
from models.samples.trajectories import Trajectories
from models.weights.buckets import from_host
from models.weights.canary import Canary
from models.weights.digests import DigestBook
from tasks.actors import trainer_rank
from tasks.actors.messages import BUSY_SECONDS, OldBatch, RankBatch, RankMiniBatch, SampleMismatch
from tasks.actors.trainer_rank import TrainerRank, part_of
from tasks.actors.weight_transport import Route
from tasks.config.trainer import TrainerConfig
from tests.models.training.test_engine import batch_of, config_of, rolled_out
from tests.support.helpers import actor_config, largest_difference, noise_keys, prompt_table

ADVANTAGES = np.array([1.0, -0.5], np.float32)


def trajectories() -> Trajectories:
    """Two samples of two steps."""
    own = torch.arange(4.0).reshape(2, 2)
    keys, index = noise_keys(1, 2), torch.zeros(2, dtype=torch.long)
    return Trajectories(keys, prompt_table((5,)), index, (0, 1), torch.zeros(2, 3, 4), torch.ones(2, 2), own)


def test_a_batch_is_compared_with_the_trainers_own_scores_where_there_are_some() -> None:
    samples: Any = trajectories()
    plain, advantages = part_of(RankBatch(samples, samples.keys, ADVANTAGES, None))
    assert plain is samples, "the rollout's are the old ones"
    assert advantages.tolist() == ADVANTAGES.tolist()
    scores, weights, means = -torch.ones(2, 2), torch.full((2, 2), 0.5), torch.full((2, 2, 4), 7.0)
    old: Any = OldBatch(scores, weights, means)  # type: ignore[arg-type]  # Ray's reference, as a rank has fetched it
    found: Any = part_of(RankBatch(samples, samples.keys, ADVANTAGES, old))[0]
    assert [found.log_probs, found.is_weights, found.means] == [scores, weights, means]
    assert found.latents is samples.latents


def test_advantages_of_other_samples_are_refused() -> None:
    """Also of the same ones in another order."""
    samples: Any = trajectories()
    with pytest.raises(SampleMismatch, match=r"its advantages belong to .*: nothing was trained"):
        part_of(RankBatch(samples, samples.keys[::-1], ADVANTAGES, None))


class Timed:
    """Stands for an engine, and for the clock: steps take 2 and then 3 seconds, the rest of an update 4."""

    def __init__(self) -> None:
        self.now, self.steps = 7.0, [2.0, 3.0]

    def step_early(self, batch: object) -> None:
        """The next of the steps."""
        self.now += self.steps.pop(0)

    def update_policy(self, batches: Sequence[object], epochs: int) -> dict[str, float]:
        """Its only metric."""
        self.now += 4.0
        return {"pg_loss": 0.5}


def test_an_update_was_as_long_as_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were taken before it among them, and not those of the update before."""
    engine: Any = Timed()
    monkeypatch.setattr(trainer_rank, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    model: Any = None
    made = TrainerRank(model, actor_config(), ForwardProcessConfig(), TrainerConfig())
    made.engine = engine
    for _ in range(2):
        made.step_early(RankMiniBatch((), 1.0))
        engine.now += 10.0  # of another mini-batch the scores are waited for
    assert made.update([], 1) == {"pg_loss": 0.5, BUSY_SECONDS: 2.0 + 3.0 + 4.0}
    assert made.update([], 1) == {"pg_loss": 0.5, BUSY_SECONDS: 4.0}


@pytest.fixture
def rank(one_rank: None, one_block_model: Path) -> TrainerRank:
    """Whose policy has moved on from the average that it keeps."""
    config = config_of("full", one_block_model)
    settings = actor_config(enable=True, update_interval=1, lr=1e-2)
    made = TrainerRank(config, settings, ForwardProcessConfig(), TrainerConfig())
    made.engine, made.rank, made.book = made.new_engine(), 0, DigestBook()
    made.engine.initialize()
    made.engine.update_policy([batch_of(rolled_out(config))])
    return made


def held(rank: TrainerRank, which: Any) -> dict[str, Tensor]:
    with rank.engine.holding(which):
        return rank.engine.gather_weights()


def test_the_weights_that_are_asked_for_leave_a_rank(rank: TrainerRank, tmp_path: Path) -> None:
    """By every way: a rollout that validates the average would sample with the policy, and nothing would say so."""
    canary, nobody = Canary(prompt_table((5, 3))), Route("ipc", ())
    wanted = {which: held(rank, which) for which in ("policy", "average")}
    assert largest_difference(wanted["policy"], wanted["average"]) > 1e-4
    digests, velocities = {}, {}
    for which, expected in wanted.items():
        sent: Any
        for sent in (rank.gather_weights(which), rank.weights(which)):  # type: ignore[arg-type]
            whole = {name: tensor for bucket in sent.tensors for name, tensor in from_host(bucket, "cpu").items()}
            assert largest_difference(whole, expected) == 0.0
        digests[which] = rank.gather_weights(which).digests  # type: ignore[arg-type]
        assert rank.send_weights(1, nobody, 1 << 20, which).digests == digests[which]  # type: ignore[arg-type]
        velocities[which] = rank.canary(canary, which).velocity  # type: ignore[arg-type]
    assert digests["policy"] != digests["average"]
    assert not torch.equal(velocities["policy"], velocities["average"])
    rank.export(tmp_path / "exported")
    (file,) = (tmp_path / "exported" / "transformer").glob("*.safetensors")
    exported = load_file(file)
    assert largest_difference({name: exported[name] for name in wanted["average"]}, wanted["average"]) < 1e-6
