# SPDX-License-Identifier: Apache-2.0
"""Rollout correction against its formulas in plain Python floats."""

import math
import random
from typing import Any

import pytest
import torch

from models.algorithms import correct_rollout
from models.algorithms.rollout_correction import RatioError, too_far_apart
from models.config.rollout_correction import RolloutCorrectionConfig

STEPS = 3
NAN = float("nan")


def config(**settings: Any) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(bypass_mode=False, **settings)


def log_probs(samples: int = 30, spread: float = 0.6) -> tuple[list[list[float]], list[list[float]]]:
    """(old, rollout), a few pairs of them very far apart."""
    draw = random.Random(2)
    rollout = [[draw.gauss(-1, 1) for _ in range(STEPS)] for _ in range(samples)]
    old = [[value + draw.gauss(0, spread) for value in row] for row in rollout]
    old[3][1] += 50.0
    old[7][0] -= 50.0
    return old, rollout


def corrected(old: list, rollout: list, present: list[bool], settings: RolloutCorrectionConfig) -> Any:
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (old, rollout))
    return correct_rollout(*tensors, torch.tensor(present), settings)


# ---- the reference, one sample at a time


def log_ratios(old: list, rollout: list) -> list[list[float]]:
    return [[min(max(a - b, -20), 20) for a, b in zip(*rows, strict=True)] for rows in zip(old, rollout, strict=True)]


def keeps(row: list[float], settings: RolloutCorrectionConfig) -> list[bool]:
    """Which steps of a sample stay."""
    mode, threshold = settings.rollout_rs, settings.rollout_rs_threshold
    if mode is None:
        return [True] * STEPS
    kind = mode[-2:]
    estimates = [{"k1": lr, "k2": lr * lr / 2, "k3": math.exp(lr) - 1 - lr}[kind] for lr in row]
    if isinstance(threshold, tuple):
        good = lambda value: math.log(threshold[0]) <= value <= math.log(threshold[1])  # noqa: E731
    else:
        good = lambda value: value <= threshold  # noqa: E731
    if mode.startswith("step"):
        return [good(value) for value in estimates]
    whole = {
        "seq_sum": good(sum(estimates)),
        "seq_mean": good(sum(estimates) / STEPS),
        "seq_max": all(good(value) for value in estimates),
    }[mode[:-3]]
    return [whole] * STEPS


def reference(old: list, rollout: list, present: list[bool], settings: RolloutCorrectionConfig) -> list[list[float]]:
    rows = log_ratios(old, rollout)
    kept = [[stays and here for stays in keeps(row, settings)] for row, here in zip(rows, present, strict=True)]
    weights = []
    for row in rows:
        logs = [min(max(sum(row), -20), 20)] * STEPS if settings.rollout_is == "sequence" else row
        ratios = [math.exp(lr) if settings.rollout_is else 1.0 for lr in logs]
        bounds = settings.rollout_is_bounds
        outside = [bounds is not None and not bounds[0] <= ratio <= bounds[1] for ratio in ratios]
        truncated = [min(ratio, settings.rollout_is_threshold) if settings.rollout_is else 1.0 for ratio in ratios]
        weights.append([0.0 if out else weight for weight, out in zip(truncated, outside, strict=True)])
    staying = [w for ws, ks in zip(weights, kept, strict=True) for w, k in zip(ws, ks, strict=True) if k]
    scale = sum(staying) / len(staying) if settings.rollout_is_batch_normalize else 1.0
    return [
        [w / scale if k else NAN for w, k in zip(ws, ks, strict=True)] for ws, ks in zip(weights, kept, strict=True)
    ]


IS_SETTINGS: list[dict[str, Any]] = [
    {"rollout_is": "step"},
    {"rollout_is": "sequence"},
    {"rollout_is": "step", "rollout_is_threshold": 1.2},
    {"rollout_is": "step", "rollout_is_bounds": (0.5, 3.0)},
    {"rollout_is": "sequence", "rollout_is_bounds": (0.2, 5.0), "rollout_is_batch_normalize": True},
    {"rollout_is": "step", "rollout_is_batch_normalize": True},
    {"rollout_is": "step", "rollout_is_batch_normalize": True, "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.3},
]
RS_SETTINGS: list[dict[str, Any]] = [
    {"rollout_rs": f"{scope}_{kind}", "rollout_rs_threshold": (0.5, 1.8) if kind == "k1" else 0.15}
    for scope in ("step", "seq_sum", "seq_mean", "seq_max")
    for kind in ("k1", "k2", "k3")
]


def test_weights_that_are_all_0_have_no_mean_to_divide_by() -> None:
    """Outside of the bounds a step weighs 0; it is not rejected, as NaN would say."""
    settings = config(rollout_is="step", rollout_is_bounds=(0.5, 2.0), rollout_is_batch_normalize=True)
    result = corrected([[1.0] * STEPS] * 2, [[0.0] * STEPS] * 2, [True] * 2, settings)
    assert result.is_weights.tolist() == [[0.0] * STEPS] * 2


@pytest.mark.parametrize("settings", IS_SETTINGS + RS_SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_weights_and_rejection_equal_the_reference(settings: dict[str, Any]) -> None:
    """A sample without a reward is in no statistic and in no update."""
    old, rollout = log_probs()
    present = [row not in (4, 11) for row in range(30)]
    result = corrected(old, rollout, present, config(**settings))
    expected = reference(old, rollout, present, config(**settings))
    assert torch.allclose(result.is_weights.double(), torch.tensor(expected).double(), rtol=1e-6, equal_nan=True)
    left_out = result.is_weights[torch.tensor(present)].isnan()
    if "rollout_rs" in settings:
        assert 0 < left_out.double().mean() < 1
        assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
            left_out.double().mean().item()
        )
        assert result.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(
            left_out.all(1).double().mean().item()
        )
    else:
        assert not left_out.any()


@pytest.mark.parametrize(
    ("settings", "log_ratio", "golden"),
    [
        ({"rollout_is": "step"}, [math.log(1.5), math.log(3), -math.log(4)], [1.5, 2.0, 0.25]),
        ({"rollout_is": "sequence"}, [math.log(1.5), math.log(3), -math.log(4)], [1.125] * 3),
        ({"rollout_is": "step", "rollout_is_bounds": (0.5, 2.5)}, [0.0, math.log(3), -math.log(4)], [1.0, 0.0, 0.0]),
        ({"rollout_rs": "step_k1", "rollout_rs_threshold": (0.5, 2.0)}, [0.0, 0.7, -0.6], [1.0, NAN, 1.0]),
        ({"rollout_rs": "step_k2", "rollout_rs_threshold": 0.18}, [0.0, 0.7, -0.59], [1.0, NAN, 1.0]),
        ({"rollout_rs": "step_k3", "rollout_rs_threshold": 0.2}, [0.6, 0.7, -0.7], [NAN, NAN, 1.0]),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": (0.5, 2.0)}, [0.0, 0.1, -0.8], [NAN] * 3),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": (0.5, 2.0)}, [0.9, 0.1, -0.8], [1.0] * 3),
    ],
)
def test_golden_weights(settings: dict[str, Any], log_ratio: list[float], golden: list[float]) -> None:
    result = corrected([log_ratio], [[0.0] * 3], [True], config(**settings))
    assert result.is_weights.flatten().tolist() == pytest.approx(golden, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("settings", IS_SETTINGS + RS_SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_a_sample_whose_log_ratio_is_not_finite_is_rejected(settings: dict[str, Any], bad: float) -> None:
    """The weights of the others and all that is said of them are as if it were not there."""
    old, rollout = log_probs()
    without = corrected(old[1:], rollout[1:], [True] * 29, config(**settings))
    old[0][1] = bad
    result = corrected(old, rollout, [True] * 30, config(**settings))
    assert result.is_weights[0].isnan().all()
    assert torch.equal(result.is_weights[1:].nan_to_num(-1.0), without.is_weights.nan_to_num(-1.0))
    left_out = {name for name in result.metrics if name.endswith("masked_fraction")}
    for name in left_out:
        assert result.metrics[name] == pytest.approx((29 * without.metrics[name] + 1) / 30)
    assert result.metrics["rollout_corr/nonfinite_fraction"] == pytest.approx(1 / 30)
    same = result.metrics.keys() - left_out - {"rollout_corr/nonfinite_fraction"}
    assert all(result.metrics[name] == without.metrics[name] for name in same)


def test_no_sample_may_be_left_of_log_probs_that_are_not_finite() -> None:
    result = corrected([[NAN] * STEPS], [[0.0] * STEPS], [True], config(rollout_is="step"))
    assert result.is_weights.isnan().all()
    assert result.metrics == {"rollout_corr/nonfinite_fraction": 1.0}


def test_a_log_ratio_is_held_at_twenty() -> None:
    settings = config(rollout_is="sequence", rollout_is_threshold=1e30)
    result = corrected([[500.0, 500.0, 500.0]], [[0.0] * 3], [True], settings)
    assert result.is_weights.flatten().tolist() == pytest.approx([math.exp(20)] * 3, rel=1e-6)
    assert result.metrics["rollout_corr/logprob_abs_diff_max"] == 20.0


def test_diagnostics_are_their_formulas_and_need_no_correction() -> None:
    old, rollout = log_probs()
    present = [row not in (3, 7) for row in range(30)]
    result = corrected(old, rollout, present, config())
    assert result.is_weights is None
    rows = [row for row, here in zip(log_ratios(old, rollout), present, strict=True) if here]
    flat = [lr for row in rows for lr in row]
    ratios = [math.exp(lr) for lr in flat]
    squares = sum(ratio**2 for ratio in ratios)
    assert result.metrics == pytest.approx(
        {
            "rollout_corr/rollout_is_eff_sample_size": sum(ratios) ** 2 / (len(flat) * squares),
            "rollout_corr/chi2": squares / len(flat) - 1,
            "rollout_corr/k3_kl": sum(math.exp(lr) - 1 - lr for lr in flat) / len(flat),
            "rollout_corr/logprob_abs_diff_mean": sum(map(abs, flat)) / len(flat),
            "rollout_corr/logprob_abs_diff_max": max(map(abs, flat)),
        },
        rel=1e-9,
    )


@pytest.mark.parametrize("settings", [{}, *IS_SETTINGS[:2], *RS_SETTINGS[::5]], ids=lambda s: "-".join(s) or "nothing")
def test_a_sample_without_a_reward_is_in_no_diagnostic(settings: dict[str, Any]) -> None:
    """The metrics are those of the others alone, whatever is corrected; the first left out is one far apart."""
    old, rollout = log_probs()
    present = [row not in (3, 12) for row in range(30)]
    kept = [[row for row, here in zip(rows, present, strict=True) if here] for rows in (old, rollout)]
    found = corrected(old, rollout, present, config(**settings)).metrics
    assert found == pytest.approx(corrected(*kept, [True] * 28, config(**settings)).metrics)
    assert found != pytest.approx(corrected(old, rollout, [True] * 30, config(**settings)).metrics)


def test_equal_engines_need_no_correction() -> None:
    old, _ = log_probs()
    metrics = corrected(old, old, [True] * 30, config()).metrics
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0
    assert metrics["rollout_corr/chi2"] == metrics["rollout_corr/k3_kl"] == 0.0


def test_a_third_of_the_clip_range_warns_and_more_than_allowed_stops() -> None:
    assert too_far_apart(3.3e-5, 1e-4, 0.5, True) is None
    message = too_far_apart(3.4e-5, 1e-4, 0.5, True)
    assert message is not None
    assert "differ from 1 by 3.4e-05 on average, 0.34 of diffusion_loss.clip_ratio 0.0001" in message
    with pytest.raises(RatioError, match=r"7.4e-05 on average, 0.74 of .* allows a share of 0.5, and null only warns"):
        too_far_apart(7.4e-5, 1e-4, 0.5, True)
    with pytest.raises(RatioError, match=r"0\.2 of diffusion_loss\.clip_ratio"):
        too_far_apart(2e-5, 1e-4, 0.1, True)
    assert too_far_apart(7.4e-5, 1e-4, None, True) is not None
    assert too_far_apart(2e-5, 1e-4, None, True) is None
    for bypass, advice in ((True, "Set .*bypass_mode false"), (False, "Set actor.guidance_gradient both")):
        with pytest.raises(RatioError, match=advice):
            too_far_apart(1.0, 1e-4, 0.5, bypass)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is": "step"}, "bypass_mode is true.*would do nothing: set bypass_mode to false"),
        ({"rollout_rs": "step_k2", "rollout_rs_threshold": 1.0}, "bypass_mode is true"),
        ({"bypass_mode": False, "rollout_is_batch_normalize": True}, "rollout_is is null"),
        ({"bypass_mode": False, "rollout_is_bounds": (0.5, 2.0)}, "rollout_is is null"),
        (
            {"bypass_mode": False, "rollout_is": "step", "rollout_is_bounds": (2.0, 0.5)},
            r"\[2.0, 0.5\]: give \[lo, hi\]",
        ),
        ({"bypass_mode": False, "rollout_rs_threshold": 1.0}, "rollout_rs is null: name a mode"),
        ({"bypass_mode": False, "rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0}, r"k1 needs \[lo, hi\]"),
        ({"bypass_mode": False, "rollout_rs": "step_k3"}, "rollout_rs_threshold is None: step_k3 needs one number"),
        ({"bypass_mode": False, "rollout_rs": "step_k9"}, "step_k3"),
    ],
)
def test_settings_that_cannot_act_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(**settings)


# ---- settings of verl


@pytest.mark.parametrize(("low", "high"), [(0.9, 3.0), (0.5, 2.0), (0.2, 1.5)])
def test_k1_is_verls_with_the_bounds_turned_over(low: float, high: float) -> None:
    """verl keeps a step where -lr, its k1, is in [log lo, log hi]."""
    old, rollout = log_probs()
    settings = config(rollout_rs="step_k1", rollout_rs_threshold=(1 / high, 1 / low))
    kept = ~corrected(old, rollout, [True] * 30, settings).is_weights.isnan()
    theirs = [[math.log(low) <= -lr <= math.log(high) for lr in row] for row in log_ratios(old, rollout)]
    assert kept.tolist() == theirs
    ours = corrected(old, rollout, [True] * 30, config(rollout_rs="step_k1", rollout_rs_threshold=(low, high)))
    assert (kept.tolist() == (~ours.is_weights.isnan()).tolist()) == (low * high == 1)


def test_verls_names_are_read() -> None:
    named = config(rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0")
    assert named == config(rollout_is="step", rollout_rs="seq_mean_k1", rollout_rs_threshold=(0.5, 2.0))
    assert config(rollout_rs="step_k2", rollout_rs_threshold="0.3").rollout_rs_threshold == 0.3
    schema = RolloutCorrectionConfig.model_json_schema()["properties"]
    assert "token" in str(schema["rollout_is"])
    assert "string" in str(schema["rollout_rs_threshold"])
    for wrong in ("0.5_", "1_2_3", "low_high"):
        with pytest.raises(ValueError, match="rollout_rs_threshold"):
            config(rollout_rs="seq_mean_k1", rollout_rs_threshold=wrong)
