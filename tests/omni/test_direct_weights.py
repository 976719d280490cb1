# SPDX-License-Identifier: Apache-2.0
"""Weights reach a vLLM-Omni worker by the direct ways too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.weight_actors import Actors, started


@pytest.fixture(scope="module")
def actors(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actors]:
    """A trainer rank and a worker on the CPU."""
    folder = tmp_path_factory.mktemp("direct")
    with started(tiny_model, folder, ranks=1, workers=1, engine="vllm_omni") as running:
        yield running


@pytest.mark.parametrize("transport", ["ipc", "collective"])
def test_the_canary_is_the_trainers_to_the_bit(actors: Actors, transport: str) -> None:
    """Every sync changes all weights, so old ones would fail it; no copy is in the object store."""
    for _ in range(2):
        synced, group = actors.sync(transport, max_restarts=0)
        assert group.weights is not None
        assert not group.weights.source
        assert synced.agreement.difference == 0.0
