# SPDX-License-Identifier: Apache-2.0
"""Old log-probs: what the trainer's own weights say of the samples, before its first optimiser step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from models.algorithms import correct_rollout
from models.algorithms.rollout_correction import NONFINITE
from models.config.rollout_correction import RolloutCorrectionConfig
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.trainer_group import PendingOldLogProbs, TrainerGroup
from tasks.actors.update_plan import NothingToLearn, OldScores
from tasks.data.pairs import PairBatch
from tasks.stages.stage import stage


@stage("old_log_prob")
def old_log_prob(
    trainer: TrainerGroup,
    batches: Sequence[PendingBatch | PairBatch],
    advantages: np.ndarray,
    config: RolloutCorrectionConfig,
    pending: PendingOldLogProbs | None = None,
) -> OldScores | None:
    """Score every sample with the present weights, and correct for the rollout engine's own idea of them.

    None, and no pass over the model, where no sample counts: all groups were left out on purpose
    (`algorithm.drop_equal_groups`), and the update is skipped.

    Args:
        trainer, batches: whose samples.
        advantages: [samples], NaN where one does not count.
        config: of the correction.
        pending: what the ranks were asked for before; None asks them now.

    Raises:
        NothingToLearn: every sample was rejected.
    """
    present = torch.from_numpy(~np.isnan(advantages))
    if not present.any():
        return None
    scored, rollout = trainer.old_log_probs(pending or trainer.begin_old_log_probs(batches))
    log_probs = [old.log_probs for old in scored]
    correction = correct_rollout(torch.cat(log_probs), torch.cat(rollout), present, config)
    weights: tuple[torch.Tensor | None, ...] = (None,) * len(batches)
    if correction.is_weights is not None:
        if correction.is_weights.isnan().all():
            if config.rollout_rs is None or correction.metrics[NONFINITE] == 1:
                raise NothingToLearn(
                    "no sample of the iteration has finite log-probs of both rollout and trainer, so there is nothing "
                    "to learn from: lower actor.optim.lr or actor.optim.clip_grad, or go on from an earlier checkpoint"
                )
            raise NothingToLearn(
                f"algorithm.rollout_correction.rollout_rs {config.rollout_rs} rejected every sample at threshold "
                f"{config.rollout_rs_threshold}: widen it, or find out why rollout and trainer differ"
            )
        weights = correction.is_weights.split([len(part) for part in log_probs])
    return OldScores([replace(old, is_weights=w) for old, w in zip(scored, weights, strict=True)], correction.metrics)
