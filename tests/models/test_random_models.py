# SPDX-License-Identifier: Apache-2.0
"""Models of published shape with random weights stand for loaded ones."""

import json
from pathlib import Path

import torch

from benchmarks.real_size import transformer

SMALL = {
    "_class_name": "SD3Transformer2DModel",
    "attention_head_dim": 8,
    "caption_projection_dim": 16,
    "in_channels": 4,
    "joint_attention_dim": 16,
    "num_attention_heads": 2,
    "num_layers": 1,
    "out_channels": 4,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}


def test_stored_buffers_are_in_the_format_in_which_loading_gives_them(tmp_path: Path) -> None:
    """The trainer holds them so; a rollout with others is another model."""
    (tmp_path / "drawn" / "transformer").mkdir(parents=True)
    (tmp_path / "drawn" / "transformer" / "config.json").write_text(json.dumps(SMALL))
    drawn = transformer(tmp_path / "drawn", torch.bfloat16, "cpu")
    drawn.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    loaded = type(drawn).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)  # type: ignore[attr-defined]
    formats = [{name: buffer.dtype for name, buffer in module.named_buffers()} for module in (drawn, loaded)]
    assert formats[0]
    assert formats[0] == formats[1]
