# SPDX-License-Identifier: Apache-2.0
"""What is FLUX.2 klein's own beside what the conformance tests ask of every family."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from safetensors.torch import load_file, save_file

from models.families.flux_2_klein import Flux2Klein
from models.schedulers.shift import size_and_steps_shift
from models.weights.fitting import check_network
from tests.support.helpers import model_config
from tests.support.tiny_models import save_flux_2_klein


def test_a_vae_whose_file_has_no_count_of_batches_is_whole(tmp_path: Path) -> None:
    """Nobody who does not train it reads that. Its mean and variance are another matter."""
    save_flux_2_klein(tmp_path)
    config, file = model_config(tmp_path), tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    whole = load_file(file)
    save_file({name: tensor for name, tensor in whole.items() if name != "bn.num_batches_tracked"}, file)
    check_network(tmp_path, "vae", "model.path")
    vae = Flux2Klein.load_vae(config)
    assert torch.equal(vae.bn.running_var, whole["bn.running_var"])  # type: ignore[union-attr]
    save_file({name: tensor for name, tensor in whole.items() if name != "bn.running_var"}, file)
    with pytest.raises(ValueError, match=r"bn\.running_var is not there"):
        check_network(tmp_path, "vae", "model.path")
    with pytest.raises(ValueError, match=r"lacks 1 of the weights of AutoencoderKLFlux2, .* bn.running_var: fetch"):
        Flux2Klein.load_vae(config)


@pytest.mark.parametrize("tokens", [24, 1024, 4096, 4300, 4301, 8192])
def test_the_shift_is_the_pipelines(tokens: int) -> None:
    """To the bit, below and above the size from which the steps are no matter."""
    for steps in (1, 4, 10, 28, 50, 200):
        assert size_and_steps_shift(tokens, steps) == compute_empirical_mu(tokens, steps)


def test_a_model_that_was_distilled_takes_no_guidance(tmp_path: Path) -> None:
    """Its pipeline draws without, whatever it is told, and says so in a warning."""
    save_flux_2_klein(tmp_path / "base")
    save_flux_2_klein(tmp_path / "distilled", is_distilled=True)
    guided = model_config(tmp_path / "base", guidance_scale=4.0)
    Flux2Klein.check_pipeline(guided)
    distilled = replace(guided, path=str(tmp_path / "distilled"))
    with pytest.raises(ValueError, match=r"guidance_scale is 4.0, but this model was distilled .* leave it null"):
        Flux2Klein.check_pipeline(distilled)
    for scale in (None, 1.0):
        Flux2Klein.check_pipeline(model_config(tmp_path / "distilled", guidance_scale=scale))
