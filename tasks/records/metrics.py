# SPDX-License-Identifier: Apache-2.0
"""The metrics of an iteration, under the reference system's names."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tasks.system.stopwatch import LEFT

COMPUTE_STAGES = ("gen", "ref", "old_log_prob", "adv", "update_actor")
BEHIND = "timing_s/behind/"
"""Beginning of the names of seconds that are in no step."""
SYNC = "sync"
INSIDE = f"timing_s/{SYNC}/"
"""Beginning of the names of seconds that are within a stage's."""


def compute_data_metrics_diffusion(batch: Mapping[str, Any]) -> dict[str, float]:
    """Statistics of rewards and advantages.

    Args:
        batch: `sample_level_rewards`, `uid` [B], and where there are any `advantages` and `returns`, each [B], [B, 1]
            or [B, T]. Of rewards of several steps a sample's is the mean. NaN marks what is missing; it is counted
            and left out.

    Returns:
        critic/rewards/mean, max, min, zero_std_ratio, std_mean, group_size, missing, dropped_groups;
        critic/advantages/* and critic/returns/* mean, max, min, and critic/advantages/missing, the samples that are
        left out of the update: all of them where there is none.
    """
    rewards, uids = np.asarray(batch["sample_level_rewards"], np.float64), np.asarray(batch["uid"])
    rewards = np.where(np.isfinite(rewards), rewards, np.nan).reshape(len(uids), -1).mean(1)
    groups = [rewards[(uids == uid) & ~np.isnan(rewards)] for uid in np.unique(uids)]
    deviations = [float(np.std(group)) for group in groups if len(group) > 1]
    metrics = _spread("critic/rewards", rewards)
    if deviations:  # one sample has none
        metrics["critic/rewards/zero_std_ratio"] = float(np.mean([d == 0 for d in deviations]))
        metrics["critic/rewards/std_mean"] = float(np.mean(deviations))
    metrics |= {
        "critic/rewards/group_size": len(rewards) / len(groups),
        "critic/rewards/missing": float(np.isnan(rewards).sum()),
        "critic/rewards/dropped_groups": float(sum(len(group) < 2 for group in groups)),
    }
    for name in ("advantages", "returns"):
        if name in batch:
            metrics |= _spread(f"critic/{name}", np.asarray(batch[name], np.float64))
    if "advantages" in batch:
        rows = np.asarray(batch["advantages"]).reshape(len(uids), -1)
        metrics["critic/advantages/missing"] = float(np.isnan(rows).any(1).sum())
    return metrics


def compute_throughput_metrics_diffusion(
    batch: Mapping[str, Any], timing_raw: Mapping[str, float], n_gpus: float
) -> dict[str, float]:
    """perf/total_num_images, perf/time_per_step and perf/throughput (images per second and GPU).

    Args:
        batch: with `sample_level_rewards` [B].
        timing_raw: seconds by stage, with `step`.
        n_gpus: that the run holds: of trainer ranks, rollout workers and rewards; on the CPU trainer ranks.
    """
    images, seconds = len(batch["sample_level_rewards"]), timing_raw["step"]
    return {
        "perf/total_num_images": float(images),
        "perf/time_per_step": seconds,
        "perf/throughput": images / (seconds * n_gpus),
    }


def compute_timing_metrics_diffusion(timing_raw: Mapping[str, float], num_images: int) -> dict[str, float]:
    """timing_s/<stage> for all stages and timing_per_image_ms/<stage> for those that compute per image.

    With the `orchestration` of `Stopwatch.finished`, timing_s/step is the sum of the others.
    """
    seconds = {f"timing_s/{name}": value for name, value in timing_raw.items()}
    per_image = {
        f"timing_per_image_ms/{name}": timing_raw[name] * 1000 / num_images
        for name in COMPUTE_STAGES
        if name in timing_raw
    }
    return seconds | per_image


def compute_utilisation_metrics(
    flops: Mapping[str, float], device_seconds: Mapping[str, float], peak_tflops: Mapping[str, float]
) -> dict[str, float]:
    """perf/tflops/<stage>, 1e12 operations a second and device, and perf/mfu/<stage>, their share of the peak.

    Model FLOPs utilisation as defined in PaLM (arXiv 2204.02311, appendix B): of the operations that the model needs.
    With gradient checkpointing perf/hfu/update is the share of those that were done, the recomputed ones included.

    Args:
        flops: operations of rollout and update, and with checkpointing of `update/recomputed`.
        device_seconds: of the same stages, over all devices.
        peak_tflops: of one device; a stage that is not in it has no mfu.
    """
    rates = {stage: count / device_seconds[stage] / 1e12 for stage, count in flops.items()}
    done = rates.pop("update/recomputed", None)
    metrics = {f"perf/tflops/{stage}": rate for stage, rate in rates.items()}
    metrics |= {f"perf/mfu/{stage}": rate / peak_tflops[stage] for stage, rate in rates.items() if stage in peak_tflops}
    if done is not None and "update" in peak_tflops:
        metrics["perf/hfu/update"] = done / peak_tflops["update"]
    return metrics


def orchestration_metrics(timing_raw: Mapping[str, float]) -> dict[str, float]:
    """perf/orchestration_s and its share of the step: wall time that no stage accounts for."""
    outside = timing_raw[LEFT]
    return {"perf/orchestration_s": outside, "perf/orchestration_share": outside / timing_raw["step"]}


def behind_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """timing_s/behind/<stage>: what was written of an iteration while the next one went on, no part of its step."""
    return {f"{BEHIND}{name}": value for name, value in seconds.items()}


def inside_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """timing_s/sync/<part>: what trainer and rollout did within timing_s/update_weights, side by side."""
    return {f"timing_s/{name}": value for name, value in seconds.items()}


def cost_metrics(before: Mapping[str, float], timing_raw: Mapping[str, float], gpus: float) -> dict[str, float]:
    """What the recorded iterations took so far: cost/hours and cost/gpu_hours.

    Args:
        before: the same, up to the iteration before; empty at the beginning.
        timing_raw: seconds by stage, with `step`.
        gpus: that the run holds; 0 on the CPU.
    """
    hours = timing_raw["step"] / 3600
    spent = {"cost/hours": hours, "cost/gpu_hours": hours * gpus}
    return {name: before.get(name, 0.0) + value for name, value in spent.items()}


def _spread(prefix: str, values: np.ndarray) -> dict[str, float]:
    present = values[~np.isnan(values)]
    if not present.size:  # every group was dropped: there is nothing to describe
        return {}
    return {
        f"{prefix}/mean": float(present.mean()),
        f"{prefix}/max": float(present.max()),
        f"{prefix}/min": float(present.min()),
    }
