# SPDX-License-Identifier: Apache-2.0
"""A run whose optimiser steps begin before all is scored is the run whose steps wait, undisturbed and failing."""

from pathlib import Path

import pytest

from tasks.records.run_store import CheckpointStore
from tests.platform.test_resume import final_weights, history
from tests.support.platform_helpers import RayHead, Workspace, make_workspace, write_module

SLOW = """
import time
from pathlib import Path

from tasks.rewards.jpeg import JpegIncompressibility

HERE = Path(__file__).parent
LAST_OF_THE_SECOND_ITERATION = 8


def slow_size(images, prompts):
    time.sleep(0.4)
    with (HERE / "calls").open("a") as calls:
        calls.write(".")
        number = calls.tell()
    if number == LAST_OF_THE_SECOND_ITERATION and (HERE / "fails").exists():
        raise ConnectionError("the judge is gone")
    return JpegIncompressibility().score(images, prompts)
"""
"""A reward, size in bytes, that takes so long for a batch that those before it are scored well before it is."""
FAILING_LOSS = """
from pathlib import Path

from models.algorithms.policy_gradient import FlowGRPOLoss

HERE = Path(__file__).parent
CALLS_OF_THE_FIRST_ITERATION = 4


class Failing(FlowGRPOLoss):
    def __call__(self, **given):
        result = super().__call__(**given)
        fails = (HERE / "fails").exists() and len((HERE / "calls").read_text()) > CALLS_OF_THE_FIRST_ITERATION
        return type(result)(result.loss * float("nan"), result.metrics) if fails else result
"""
"""A loss whose gradient is not finite from the second iteration's first step on."""
REPLAYED = "algorithm.rollout_correction.bypass_mode=false"
"""The old log-probs are the trainer's own, and have to be there before the first step."""
SETTINGS = (
    "reward.functions={slow: {reward: 'slow_reward:slow_size', retries: 0}}",
    "reward.max_missing_fraction=0.1",
    "algorithm.global_std=false",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "trainer.save_freq=1",
)
WAITS = "trainer.early_steps=false"


def early_steps(workspace: Workspace) -> list[float]:
    (run,) = workspace.mlflow_runs()
    return [point.value for point in workspace.client().get_metric_history(run.info.run_id, "perf/early_steps")]


@pytest.mark.slow
@pytest.mark.parametrize("replayed", [(), (REPLAYED,)], ids=["recorded", "replayed"])
def test_steps_taken_early_leave_no_trace(
    tmp_path: Path, prepared: Path, prefect_server: dict[str, str], ray_head: RayHead, replayed: tuple[str, ...]
) -> None:
    """The same weights and metrics, to the bit. One that fails at the last score of its second iteration, when the
    first of that iteration's two steps is taken, goes on from before it."""
    made: dict[str, Workspace] = {}
    for name, own in {"waits": (WAITS,), "early": (), "fails": ()}.items():
        made[name] = workspace = make_workspace(tmp_path / name, prepared, prefect_server).on(ray_head)
        write_module(workspace, "slow_reward", SLOW)
        if name == "fails":
            (workspace.folder / "fails").touch()
            output = workspace.train(*SETTINGS, *replayed, check=False)
            assert "reward 'slow' is missing for 4 of 16 samples" in output
            assert [run.info.status for run in workspace.mlflow_runs()] == ["FAILED"]
        workspace.train(*SETTINGS, *replayed, *own)
    assert early_steps(made["waits"]) == [0.0] * 3
    assert early_steps(made["early"]) == [1.0] * 3
    assert early_steps(made["fails"]) == [1.0] * 3
    expected = final_weights(made["waits"])
    for name in ("early", "fails"):
        assert history(made[name]) == history(made["waits"])
        found = final_weights(made[name])
        assert all((found[weight] == expected[weight]).all() for weight in expected)


@pytest.mark.slow
def test_what_was_done_is_kept_where_a_step_taken_early_fails(
    tmp_path: Path, prepared: Path, prefect_server: dict[str, str], ray_head: RayHead
) -> None:
    """The first of four of an iteration: as where steps wait, all its samples are scored, and scored once alone, and
    the checkpoint before it stays."""
    made: dict[str, Workspace] = {}
    loss = "actor_rollout_ref.actor.diffusion_loss.loss_mode=own_loss:Failing"
    settings = (*SETTINGS, loss, "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    for name, own in {"waits": (WAITS,), "fails": ()}.items():
        made[name] = workspace = make_workspace(tmp_path / name, prepared, prefect_server).on(ray_head)
        write_module(workspace, "slow_reward", SLOW.replace("raise ConnectionError", "pass  # "))
        write_module(workspace, "own_loss", FAILING_LOSS)
        if name == "fails":
            (workspace.folder / "fails").touch()
            output = workspace.train(*settings, check=False)
            assert "norm of optimiser step 4 is nan" in " ".join(output.split())
            assert CheckpointStore(workspace.run_folder() / "checkpoints", keep=2).iterations() == [1]
            (workspace.folder / "fails").unlink()
        workspace.train(*settings, *own)
        assert len((workspace.folder / "calls").read_text()) == 3 * 4 + 1, "and the measurement at the end"
    assert early_steps(made["fails"]) == [3.0, 0.0, 3.0], "what is kept of the second is scored already"
    assert history(made["fails"]) == history(made["waits"])
    expected, found = final_weights(made["waits"]), final_weights(made["fails"])
    assert all((found[weight] == expected[weight]).all() for weight in expected)
