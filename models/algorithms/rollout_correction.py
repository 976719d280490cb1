# SPDX-License-Identifier: Apache-2.0
"""Rollout correction: the rollout engine and the trainer compute the same policy's log-probs a little differently.

lr = clamp(lp_old - lp_rollout, -20, 20), lp_old of the trainer's weights before the update. Importance weights carry
the difference into the loss, rejection leaves out what differs too much. The W trained steps of a sample are its
sequence.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.errors import DoubleflowError

if TYPE_CHECKING:
    from models.config.rollout_correction import RolloutCorrectionConfig

LOG_RATIO_LIMIT = 20.0
WARNED_SHARE_OF_CLIP = 1 / 3
NONFINITE = "rollout_corr/nonfinite_fraction"
"""Share of the samples with a log-prob that is not finite."""


class RatioError(DoubleflowError, RuntimeError):
    """The first ratios of a run are too far from 1 for its clip range."""


@dataclass(frozen=True)
class Correction:
    """What the update is to do with each step of each sample.

    Attributes:
        is_weights: [B, W] multipliers of the loss; NaN where the step is rejected, which leaves numerator and
            denominator. None where nothing is corrected.
        metrics: diagnostics, under rollout_corr/.
    """

    is_weights: Tensor | None
    metrics: dict[str, float]


def correct_rollout(
    old_log_probs: Tensor, rollout_log_probs: Tensor, present: Tensor, config: "RolloutCorrectionConfig"
) -> Correction:
    """Weights and rejection of an iteration's samples.

    A sample with an lr that is not finite is rejected whole, whatever is corrected, and is in no statistic of the
    others. Where nothing is, it stays, and the update meets it (`trainer.on_nonfinite`).

    Args:
        old_log_probs: [B, W], the trainer's.
        rollout_log_probs: [B, W], as the rollout engine recorded them.
        present: [B], false where the reward is missing: such a sample is in no statistic.
        config: what to do.
    """
    log_ratio = old_log_probs.double() - rollout_log_probs.double()
    sound = log_ratio.isfinite().all(1)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if config.rollout_is is None and config.rollout_rs is None:
        return Correction(None, divergences(log_ratio[present]))
    metrics = divergences(log_ratio[present & sound]) | {NONFINITE: float((~sound[present]).double().mean())}
    log_ratio = log_ratio.masked_fill(~sound[:, None], 0.0)  # to compute with, as it is rejected
    kept = (present & sound)[:, None].expand_as(log_ratio)
    if config.rollout_rs is not None:
        assert config.rollout_rs_threshold is not None, "the config's own check"
        kept = kept & ~rejected(log_ratio, config.rollout_rs, config.rollout_rs_threshold)
        metrics |= _shares_left_out(kept[present])
    weights = torch.ones_like(log_ratio)
    if config.rollout_is is not None:
        weights = importance_weights(log_ratio, kept, config)
        metrics |= _spread(weights[kept])
    return Correction(weights.masked_fill(~kept, float("nan")).float(), metrics)


def importance_weights(log_ratio: Tensor, kept: Tensor, config: "RolloutCorrectionConfig") -> Tensor:
    """exp(lr) of the step or exp(sum lr) of the sample, truncated; [B, W].

    Args:
        log_ratio: [B, W].
        kept: [B, W], what is in the mean that `rollout_is_batch_normalize` divides by.
        config: `rollout_is` and the fields that go with it.
    """
    if config.rollout_is == "sequence":
        total = log_ratio.sum(1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_ratio = total.expand_as(log_ratio)
    ratio = torch.exp(log_ratio)
    weights = ratio.clamp_max(config.rollout_is_threshold)
    if config.rollout_is_bounds is not None:
        low, high = config.rollout_is_bounds
        weights = weights.masked_fill((ratio < low) | (ratio > high), 0.0)
    mean = weights[kept].mean()
    return weights / mean if config.rollout_is_batch_normalize and mean > 0 else weights


def rejected(log_ratio: Tensor, mode: str, threshold: float | tuple[float, float]) -> Tensor:
    """Which steps are left out, [B, W].

    k1 = lr must lie in [log lo, log hi], so exp(lr) = old / rollout in [lo, hi] (verl's k1 is -lr, so it bounds
    rollout / old); k2 = lr^2 / 2 and k3 = exp(lr) - 1 - lr must not exceed the threshold.
    `step_` looks at each step, `seq_sum_`, `seq_mean_` and `seq_max_` at the sample: the sum or mean of its steps, or
    whether any step is out.

    Args:
        log_ratio: [B, W].
        mode: `step_k1` to `seq_max_k3`.
        threshold: (lo, hi) of ratios for k1, else a number.
    """
    scope, kind = mode.rsplit("_", 1)
    estimates = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(log_ratio) - 1 - log_ratio}[kind]
    if scope in ("seq_sum", "seq_mean"):
        joined = estimates.sum(1, keepdim=True) if scope == "seq_sum" else estimates.mean(1, keepdim=True)
        estimates = joined.expand_as(log_ratio)
    if isinstance(threshold, tuple):
        low, high = torch.log(torch.tensor(threshold, dtype=log_ratio.dtype))
        out = (estimates < low) | (estimates > high)
    else:
        out = estimates > threshold
    return out.any(1, keepdim=True).expand_as(out) if scope == "seq_max" else out


def divergences(log_ratio: Tensor) -> dict[str, float]:
    """How far the two engines are apart, from lr [B, W]; nothing where B is 0.

    ESS = (sum r)^2 / (n sum r^2), a share of the samples; chi2 = mean r^2 - 1; k3_kl = mean (r - 1 - lr); r = exp(lr).
    """
    if not len(log_ratio):
        return {}
    ratio, distance = torch.exp(log_ratio), log_ratio.abs()
    values = {
        "rollout_is_eff_sample_size": ratio.sum() ** 2 / (ratio.numel() * (ratio**2).sum()),
        "chi2": (ratio**2).mean() - 1,
        "k3_kl": (ratio - 1 - log_ratio).mean(),
        "logprob_abs_diff_mean": distance.mean(),
        "logprob_abs_diff_max": distance.max(),
    }
    return {f"rollout_corr/{name}": float(value) for name, value in values.items()}


def too_far_apart(deviation: float, clip_ratio: float, allowed: float | None, bypass_mode: bool) -> str | None:
    """A sentence where what is no change of the policy eats up the clip range, else None.

    Args:
        deviation: mean |ratio - 1| before the weights move, where old and present log-probs are of the same weights.
        clip_ratio: the loss's.
        allowed: share of it that the deviation may be, `trainer.max_logprob_difference`; None never raises.
        bypass_mode: are the old log-probs the rollout's, or the trainer's own?

    Raises:
        RatioError: it is a larger share.
    """
    share = deviation / clip_ratio
    if share <= WARNED_SHARE_OF_CLIP and (allowed is None or share <= allowed):
        return None
    sides = "the rollout's log-probs" if bypass_mode else "the trainer's own log-probs of before the update"
    other = "actor.guidance_gradient both or model.compile false"
    change = "algorithm.rollout_correction.bypass_mode false" if bypass_mode else other
    found = (
        f"before any weight has moved the ratios to {sides} differ from 1 by {deviation:.2g} on average, {share:.2g} "
        f"of diffusion_loss.clip_ratio {clip_ratio:.2g}: the clip acts on that, not on the policy. Set {change}, "
        "compute in one number format on both sides (model.dtype, fsdp_config.param_dtype), or widen clip_ratio"
    )
    if allowed is not None and share > allowed:
        raise RatioError(f"{found}; trainer.max_logprob_difference allows a share of {allowed:g}, and null only warns")
    return found


def _shares_left_out(kept: Tensor) -> dict[str, float]:
    return {
        "rollout_corr/rollout_rs_masked_fraction": float((~kept).double().mean()),
        "rollout_corr/rollout_rs_seq_masked_fraction": float((~kept.any(1)).double().mean()),
    }


def _spread(weights: Tensor) -> dict[str, float]:
    if not len(weights):
        return {}
    return {
        "rollout_corr/rollout_is_mean": float(weights.mean()),
        "rollout_corr/rollout_is_min": float(weights.min()),
        "rollout_corr/rollout_is_max": float(weights.max()),
    }
