# SPDX-License-Identifier: Apache-2.0
"""The task that reads an iteration's preference pairs."""

from collections.abc import Sequence

from tasks.config.tree import TrainConfig
from tasks.data.embeddings import Embeddings
from tasks.data.pairs import Pair, PairBatch, PairDataset
from tasks.stages.stage import stage


@stage("read_pairs")
def read_pairs(
    data: PairDataset, embeddings: Embeddings, config: TrainConfig, pairs: Sequence[Pair], iteration: int
) -> list[PairBatch]:
    """The iteration's pairs, one batch for each rank that has samples of its own, and optimiser step."""
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size // config.data_ranks
    return list(data.batches(pairs, embeddings, size, config.trainer.seed, iteration))
