# SPDX-License-Identifier: Apache-2.0
"""The training flow with vLLM-Omni as its rollout engine, on Prefect, Ray and MLflow."""

from tests.support.platform_helpers import Workspace, prefect_server, prepared, workspace

__all__ = ["prefect_server", "prepared", "workspace"]


def test_one_setting_trains_with_vllm_omni(workspace: Workspace) -> None:
    """The same loop and the same rewards; the log-probs are the trainer's, so nothing has to be corrected."""
    workspace.train(
        "actor_rollout_ref.rollout.name=vllm_omni",
        "actor_rollout_ref.rollout.placement=colocated",
        "actor_rollout_ref.model.lora_rank=4",
        "trainer.total_training_steps=1",
    )
    (run,) = workspace.mlflow_runs()
    metrics = run.data.metrics
    assert run.info.status == "FINISHED"
    assert metrics["rollout_corr/logprob_abs_diff_max"] <= 2e-6
    assert metrics["sync/canary_difference"] < 1e-4
    assert metrics["actor/grad_norm"] > 0
    assert metrics["timing_s/sleep"] > 0
    assert metrics["critic/rewards/std_mean"] > 0
