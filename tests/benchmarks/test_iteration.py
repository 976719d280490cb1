# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of an iteration says of its kernels, and that it measures what the recipes have."""

import re
import sys
from pathlib import Path
from subprocess import run

import pytest

from benchmarks.iteration import RESULTS, VARIANTS, configs, kind_of
from benchmarks.logs import rows_in
from tasks.config.recipes import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_bias_TNT", "matrix products"),
        ("triton_red_fused__scaled_mm__to_copy_abs_amax_clamp_div_gelu_permute_view_13", "compiled between them"),
        ("triton_poi_fused_addmm_gelu_view_11", "compiled between them"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)", "others"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)
def test_a_compiled_kernel_is_none_of_the_products_it_is_named_after(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


@pytest.mark.parametrize("recipe", ["sd35-ocr-flow-grpo", "qwen-image-ocr-flow-grpo-lora"])
def test_its_trainer_shares_weights_as_the_recipes_do(recipe: str, tiny_model: Path) -> None:
    _, actor = configs("tiny", tiny_model, VARIANTS["and gathered once"] | {"micro_batch": 1}, kl=0)
    wanted = load_recipe(recipe).actor_rollout_ref.actor.fsdp_config
    assert actor.fsdp_config.shard_frozen == wanted.shard_frozen
    assert actor.fsdp_config.reshard_after_forward == wanted.reshard_after_forward


@pytest.mark.slow
def test_an_iteration_of_several_batches_is_trained_in_as_many_steps_as_asked_for(tmp_path: Path) -> None:
    """Two steps of two batches of four pictures; only the first finds what the rollout recorded."""
    given = "--model tiny --device cpu --batches 4 --optimizer-steps 2 --repeats 1 --variants"
    command = [sys.executable, "-m", "benchmarks.iteration", *given.split(), "and recorded", "--work", str(tmp_path)]
    done = run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for metric, value in {"optimizer_steps": 2, "sample_steps": 48, "recorded_steps": 24}.items():
        assert re.search(rf"'{metric}': {value}\b", done.stdout), metric
    other = run([*command, "--batch", "8"], cwd=ROOT, capture_output=True, text=True)
    assert other.returncode == 1
    assert f"error: {tmp_path} has what was measured with --batch None: give another as --work" in other.stderr
    (row,) = rows_in(tmp_path / RESULTS)
    assert row["images/s"] * (row["rollout_s"] + row["update_s"] + row["sync_s"]) == pytest.approx(4 * 4)
