# SPDX-License-Identifier: Apache-2.0
"""Text encoders as they are loaded: a language model gives its hidden states, and computes no logits for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.families.loading import load_text_encoders, load_whole, text_encoder_classes

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize("family", ["flux_2_klein", "qwen_image"])
def test_a_language_model_computes_no_logits_and_the_same_states(
    family: str, tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder(family)
    encoder: Any = load_text_encoders(folder, torch.float32)["text_encoder"]
    whole: Any = load_whole(text_encoder_classes(folder)["text_encoder"], folder, "text_encoder", torch.float32)
    with torch.no_grad():
        found, expected = (model(TOKENS, output_hidden_states=True) for model in (encoder, whole))
    assert expected.logits.shape[-1] == whole.config.get_text_config().vocab_size
    assert found.logits.shape == found.hidden_states[-1].shape != expected.logits.shape
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["stable_diffusion_3", "flux", "wan", "z_image"])
def test_other_encoders_are_whole(family: str, tiny_folder: Callable[[str], Path]) -> None:
    """CLIP's projection of the pooled text is read; an encoder without a head has nothing to leave out."""
    folder = tiny_folder(family)
    for name, encoder in load_text_encoders(folder, torch.float32).items():
        whole = load_whole(text_encoder_classes(folder)[name], folder, name, torch.float32)
        assert encoder.state_dict().keys() == whole.state_dict().keys()
