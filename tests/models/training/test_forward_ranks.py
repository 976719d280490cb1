# SPDX-License-Identifier: Apache-2.0
"""Two trainer ranks are one trainer for losses of the forward process too, whatever the ranks' shares are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.samples.trajectories import FinishedLatents
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tests.models.training.test_forward_engine import batches_of, finished, largest_difference, old_weights, trainer
from tests.support.helpers import gloo_world, model_config, single_rank, wait_until_saved

NAN = float("nan")
LORA = {"lora_rank": 4, "lora_alpha": 8}
SHARED = {"share_noise_in_group": True, "timestep_sampling": "stratified", "num_train_timesteps": 2}
# name -> loss, settings of model or noise, advantages of the first rank's six samples (two groups) and the second's
# three (one).
CASES: dict[str, tuple[str, dict[str, Any], tuple[list[float], list[float]]]] = {
    "fewer": ("diffusion_nft", {}, ([1.0, -0.8, NAN, 0.3, 0.1, -0.7], [0.6, NAN, NAN])),
    "none": ("awm", LORA, ([1.0, -0.8, 0.3, -0.3, 0.2, NAN], [NAN, NAN, NAN])),
    "shared": ("diffusion_nft", SHARED, ([1.0, NAN, 0.3, -0.3, 0.2, -0.1], [-0.9, 0.4, NAN])),
    "no pair": ("dpo", {}, ([0.2, 0.2, 0.2, NAN, NAN, NAN], [0.6, 0.1, -0.5])),
}
RESUMED = ("fewer", "none")
"""Full weights, and LoRA; both with an average and an old policy, which is all that a checkpoint could hold."""


def engine_of(model: Path, case: str) -> DiffusersFSDPEngine:
    loss, given, _ = CASES[case]
    kind, forward = (given, {}) if given is not SHARED else ({}, given)
    return trainer(model_config(model, **kind), loss, enable=True, update_interval=1, **forward)


def held_by(engine: DiffusersFSDPEngine) -> list[dict[str, Tensor]]:
    """Weights, their average, and the old policy's where the loss keeps one."""
    with engine.holding("average"):
        average = engine.gather_weights()
    old = [] if engine.old_policy is None else [old_weights(engine)]
    return [engine.gather_weights(), average, *old]


def train(model: Path, case: str, batches: list[ActorBatch], folder: Path) -> dict[str, Any]:
    """Two iterations, of what is resumed a third one while a checkpoint is written; weights and gradient norms."""
    engine = engine_of(model, case)
    norms = [engine.update_policy(batches)["grad_norm"]]
    if case in RESUMED:
        norms.append(engine.update_policy(batches)["grad_norm"])
        engine.start_saving(folder / case)
    weights = [engine.gather_weights()]
    norms.append(engine.update_policy(batches)["grad_norm"])
    if case in RESUMED:
        wait_until_saved(engine)
    return {"norms": norms, "weights": weights + held_by(engine)}


def go_on(model: Path, case: str, batches: list[ActorBatch], folder: Path) -> dict[str, Any]:
    """The third iteration, from a checkpoint of `train`."""
    engine = engine_of(model, case)
    engine.load_checkpoint(folder / case)
    return {"norm": engine.update_policy(batches)["grad_norm"], "weights": held_by(engine)}


def parts_of(samples: list[FinishedLatents], case: str) -> list[tuple[FinishedLatents, Tensor]]:
    return [(part, torch.tensor(row)) for part, row in zip(samples, CASES[case][2], strict=True)]


def train_on_rank(
    rank: int, model: Path, samples: list[FinishedLatents], folder: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Of each case what `train` gives, and of those that are resumed where one rank's checkpoint leads to."""
    batches = {case: [ActorBatch(parts_of(samples, case)[rank : rank + 1], 1)] for case in CASES}
    return (
        {case: train(model, case, own, folder / "two") for case, own in batches.items()},
        {case: go_on(model, case, batches[case], folder / "one") for case in RESUMED},
    )


@pytest.fixture(scope="module")
def tiny_model(one_block_model: Path) -> Path:
    """One block is enough here."""
    return one_block_model


@pytest.fixture(scope="module")
def samples(tiny_model: Path) -> list[FinishedLatents]:
    return finished(model_config(tiny_model))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forward_ranks")


@pytest.fixture(scope="module")
def one_rank_result(tiny_model: Path, samples: list[FinishedLatents], folder: Path) -> dict[str, dict[str, Any]]:
    with single_rank():
        return {
            case: train(tiny_model, case, [ActorBatch(parts_of(samples, case), 1)], folder / "one") for case in CASES
        }


@pytest.fixture(scope="module")
def two_ranks(
    tiny_model: Path, samples: list[FinishedLatents], folder: Path, one_rank_result: dict[str, dict[str, Any]]
) -> list[tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]]:
    return gloo_world(train_on_rank, 2, folder / "world", tiny_model, samples, folder)


@pytest.mark.slow  # `test_fsdp_ranks.py` holds nearly the same for the policy gradient
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(
    two_ranks: list[tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]],
    one_rank_result: dict[str, dict[str, Any]],
    case: str,
) -> None:
    """A rank that has fewer samples than the other, or none, takes part and adds nothing."""
    (first, second), one = (rank[0][case] for rank in two_ranks), one_rank_result[case]
    assert first["norms"] == second["norms"] == pytest.approx(one["norms"], rel=1e-3)
    for ours, theirs in zip(first["weights"], one["weights"], strict=True):
        assert largest_difference(ours, theirs) < 1e-5
    assert largest_difference(one["weights"][0], one["weights"][1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    two_ranks: list[tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]],
    one_rank_result: dict[str, dict[str, Any]],
    tiny_model: Path,
    samples: list[FinishedLatents],
    folder: Path,
    case: str,
) -> None:
    """One of two ranks with one, and one of one rank with two."""
    one = one_rank_result[case]
    with single_rank():
        resumed = go_on(tiny_model, case, [ActorBatch(parts_of(samples, case), 1)], folder / "two")
    for gone_on in (resumed, two_ranks[0][1][case]):
        assert gone_on["norm"] == pytest.approx(one["norms"][2], rel=1e-3)
        for ours, theirs in zip(gone_on["weights"], one["weights"][1:], strict=True):
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
