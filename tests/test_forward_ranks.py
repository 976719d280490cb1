"""Two trainer ranks are one trainer for losses of the forward process too, whatever the ranks' shares are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo_world, model_config, single_rank
from test_forward_engine import batches_of, finished, largest_difference, old_weights, trainer
from torch import Tensor

from models.engines.actor_batch import ActorBatch
from models.engines.trajectories import FinishedLatents

NAN = float("nan")
LORA = {"lora_rank": 4, "lora_alpha": 8}
# name -> loss, model settings, advantages of the first rank's six samples (two groups) and the second's three (one).
CASES: dict[str, tuple[str, dict[str, Any], tuple[list[float], list[float]]]] = {
    "fewer": ("diffusion_nft", {}, ([1.0, -0.8, NAN, 0.3, 0.1, -0.7], [0.6, NAN, NAN])),
    "none": ("awm", LORA, ([1.0, -0.8, 0.3, -0.3, 0.2, NAN], [NAN, NAN, NAN])),
    "no pair": ("dpo", {}, ([0.2, 0.2, 0.2, NAN, NAN, NAN], [0.6, 0.1, -0.5])),
}


def train(model: Path, case: str, batches: list[ActorBatch], folder: Path) -> dict[str, Any]:
    """Two iterations, a checkpoint, and a third; weights and gradient norms."""
    loss, kind, _ = CASES[case]
    engine = trainer(model_config(model, **kind), loss)
    norms = [engine.update_policy(batches)["grad_norm"] for _ in range(2)]
    engine.save_checkpoint(folder / case)
    weights = [engine.gather_weights()]
    norms.append(engine.update_policy(batches)["grad_norm"])
    weights += [engine.gather_weights()] + ([] if loss == "dpo" else [old_weights(engine)])
    return {"norms": norms, "weights": weights}


def parts_of(samples: list[FinishedLatents], case: str) -> list[tuple[FinishedLatents, Tensor]]:
    return [(part, torch.tensor(row)) for part, row in zip(samples, CASES[case][2], strict=True)]


def train_on_rank(rank: int, model: Path, samples: list[FinishedLatents], folder: Path) -> dict[str, Any]:
    return {
        case: train(model, case, [ActorBatch(parts_of(samples, case)[rank : rank + 1], 1)], folder) for case in CASES
    }


@pytest.fixture(scope="module")
def samples(tiny_model: Path) -> list[FinishedLatents]:
    return finished(model_config(tiny_model))


@pytest.fixture(scope="module")
def two_ranks(
    tiny_model: Path, samples: list[FinishedLatents], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict], Path]:
    folder = tmp_path_factory.mktemp("forward_ranks")
    return gloo_world(train_on_rank, 2, folder / "world", tiny_model, samples, folder), folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(
    two_ranks: tuple[list[dict], Path], tiny_model: Path, samples: list[FinishedLatents], tmp_path: Path, case: str
) -> None:
    """A rank that has fewer samples than the other, or none, takes part and adds nothing."""
    (first, second), folder = two_ranks
    whole = [ActorBatch(parts_of(samples, case), 1)]
    with single_rank():
        one = train(tiny_model, case, whole, tmp_path)
        loss, kind, _ = CASES[case]
        resumed = trainer(model_config(tiny_model, **kind), loss)
        resumed.load_checkpoint(folder / case)
        resumed_norm = resumed.update_policy(whole)["grad_norm"]
        gone_on = [resumed.gather_weights()] + ([] if loss == "dpo" else [old_weights(resumed)])
    assert first[case]["norms"] == second[case]["norms"] == pytest.approx(one["norms"], rel=1e-3)
    for ours, theirs in zip(first[case]["weights"], one["weights"], strict=True):
        assert largest_difference(ours, theirs) < 1e-5
    assert largest_difference(one["weights"][0], one["weights"][1]) > 1e-3
    # A checkpoint of two ranks goes on with one.
    assert resumed_norm == pytest.approx(one["norms"][2], rel=1e-3)
    for ours, theirs in zip(gone_on, one["weights"][1:], strict=True):
        assert largest_difference(ours, theirs) < 1e-5


def test_the_counts_are_not_the_callers(tiny_model: Path, samples: list[FinishedLatents]) -> None:
    """What a loss leaves out, it leaves out of the mean: the plan's own count is not read."""
    with single_rank():
        engines = [trainer(model_config(tiny_model), "dpo") for _ in range(2)]
        metrics = []
        for engine, count in zip(engines, (1, 99), strict=True):
            given = batches_of(samples[:1], [torch.tensor([1.0, -0.8, NAN, 0.3, 0.1, -0.7])])
            metrics.append(engine.update_policy([ActorBatch(given[0].parts, count)]))
    assert metrics[0] == metrics[1]
