# SPDX-License-Identifier: Apache-2.0
"""The task that updates the policy."""

from collections.abc import Sequence

import numpy as np

from tasks.actors.messages import BUSY_SECONDS
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.trainer_group import TrainerGroup
from tasks.actors.update_plan import OldScores
from tasks.data.pairs import PairBatch
from tasks.records.flow_page import page_logger
from tasks.stages.stage import stage


@stage("update_actor", "update")
def update(
    trainer: TrainerGroup,
    batches: Sequence[PendingBatch | PairBatch],
    advantages: np.ndarray,
    old: OldScores | None = None,
) -> dict[str, float]:
    """Train on one iteration's samples.

    Args:
        trainer, batches: who learns, and of what: those that no early step was taken of.
        advantages: [samples], NaN where one is left out.
        old: scores of the old policy; None takes the rollout's (`bypass_mode`).

    Optimiser steps that were left out are warned of.

    Returns:
        Metrics under actor/, whether or not the loss names them so, under rollout_corr/ how far apart the rollout's and
        the trainer's log-probs are, and perf/update_busy_s.
    """
    metrics = trainer.update(batches, advantages, old)
    if metrics.get("nonfinite_steps"):
        page_logger().warning(
            "%d optimiser steps of this iteration were left out, because their gradient was not finite "
            "(trainer.on_nonfinite skip): look at its samples and rewards",
            metrics["nonfinite_steps"],
        )
    distances = {name: metrics.pop(name) for name in list(metrics) if name.startswith("logprob_abs_diff")}
    between = {f"rollout_corr/{name.replace('/', '_')}": value for name, value in distances.items()}
    busy = {"perf/update_busy_s": metrics.pop(BUSY_SECONDS)}
    named = {f"actor/{name.removeprefix('actor/')}": value for name, value in metrics.items()}
    return named | busy | (between if old is None else old.metrics)
