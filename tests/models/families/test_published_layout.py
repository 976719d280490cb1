# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the hub's layout are what they are in diffusers' own: the same texts, weights, steps and pictures."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.cost.flops import step_flops
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest
from models.weights.trainable import export_weights, make_trainable, trainable
from tasks.data.digests import TEXT_SIDE, parts_digest, stored_parameters
from tasks.data.text_encoding import EncodingSettings, TextEncoding
from tasks.run.capacity import TEXT_ENCODERS
from tests.support.helpers import PROMPTS, model_config, noise_keys
from tests.support.published_layout import LAYOUTS, SIZE, save_both
from tests.support.tiny_models import MAX_SEQUENCE_LENGTH


@pytest.fixture(scope="module", params=LAYOUTS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A layout's name, its tiny checkpoint as diffusers writes it, and as it is published."""
    return request.param, *save_both(request.param, tmp_path_factory.mktemp(request.param))


def opened(name: str, folder: Path) -> tuple[type[DiffusionModelBase], DiffusionModelConfig]:
    """Adapter and settings of a folder, after the checks of a run's driver."""
    config = model_config(folder, **SIZE, **LAYOUTS[name].pipeline, num_inference_steps=2)
    adapter = DiffusionModelBase.get_class(config)
    adapter.check_pipeline(config)
    return adapter, config


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Names and bits."""
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def encoded(folder: Path) -> tuple[dict[str, Tensor], list[int]]:
    """Embeddings of two prompts, and their lengths."""
    text = TextEncoding(folder, EncodingSettings("float32", "cpu", MAX_SEQUENCE_LENGTH))
    return text.encode(PROMPTS[:2]), text.adapter.prompt_lengths(text._pipeline, PROMPTS)


def test_text_is_encoded_alike(folders: tuple[str, Path, Path]) -> None:
    """By shards, older names of weights, other tokenizer files, and never by a variant or what lies beside."""
    _, plain, published = folders
    (first, lengths), (second, others) = encoded(plain), encoded(published)
    assert first["prompt_embeds"].std() > 0.01
    assert not torch.equal(*first["prompt_embeds"][:2])
    assert lengths == others
    same(first, second)


def test_pictures_are_drawn_alike(folders: tuple[str, Path, Path]) -> None:
    name, plain, published = folders
    drawn = []
    for folder in (plain, published):
        adapter, config = opened(name, folder)
        text = adapter.load_text_pipeline(folder)
        rows = adapter.encode_prompts(text, PROMPTS[:1], MAX_SEQUENCE_LENGTH)
        prompts = PromptTable.of(rows | {f"negative_{key}": value for key, value in rows.items()})
        engine = DiffusersRolloutEngine(config)
        batch = engine.produce(RolloutRequest(noise_keys(1, 1), prompts, torch.tensor([0]), ()))
        cost = step_flops(config, rows["prompt_embeds"].shape[1])
        drawn.append((batch.pictures, engine.transformer.state_dict(), adapter.build_scheduler(config).sigmas, cost))
    (images, weights, sigmas, cost), (others, other_weights, other_sigmas, other_cost) = drawn
    same(weights, other_weights)
    assert torch.equal(sigmas, other_sigmas)
    assert cost == other_cost
    assert images.float().std() > 3
    assert torch.equal(images, others)


def test_what_is_counted_and_digested_are_the_components(folders: tuple[str, Path, Path]) -> None:
    """A folder `text_encoders` beside them, or a single file of everything, is none."""
    name, plain, published = folders
    output = 386 * 32 if name == "qwen-image" else 0  # its published file has the language model's output
    assert stored_parameters(published, TEXT_ENCODERS) == stored_parameters(plain, TEXT_ENCODERS) + output
    before = parts_digest(published, TEXT_SIDE)
    for file in published.glob("text_encoders/*"):
        file.write_bytes(b"another")
    assert parts_digest(published, TEXT_SIDE) == before


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "transformer", "vae"])
def test_weights_that_are_not_there_are_no_random_ones(
    component: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "model")
    (file,) = (folder / component).glob("*.safetensors")
    tensors = load_file(file)
    gone = next(
        name for name in sorted(tensors) if name.endswith(("norm1.bias", "q.weight", "proj.weight", "conv1.bias"))
    )
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file, metadata={"format": "pt"})
    config = model_config(folder, guidance_scale=3.5)
    adapter = DiffusionModelBase.get_class(config)
    load = {"vae": adapter.load_vae, "transformer": lambda config: adapter.load_transformer(config, torch.float32)}
    said = rf"{component} lacks 1 of the weights of \w+, the first of them [\w.]+: fetch"
    with pytest.raises(ValueError, match=said):
        load.get(component, lambda config: adapter.load_text_pipeline(config.path))(config)


def test_full_weights_are_exported_without_what_lies_beside(tmp_path: Path) -> None:
    """A single file of everything is many GB, and would be written with each export."""
    _, published = save_both("sd3.5-medium", tmp_path)
    adapter, config = opened("sd3.5-medium", published)
    module = adapter.load_transformer(config, torch.float32)
    make_trainable(adapter, module, config)
    export_weights(adapter, config, trainable(module), tmp_path / "weights")
    named = {name for name in json.loads((published / "model_index.json").read_text()) if not name.startswith("_")}
    texts = {"model_index.json", "LICENSE.md", "README.md"}
    assert {path.name for path in (tmp_path / "weights").iterdir()} == texts | named
    assert not [*(tmp_path / "weights").rglob("*fp16*")]
    assert DiffusionPipeline.from_pretrained(tmp_path / "weights").transformer.config.num_layers == 3


def test_full_weights_are_exported_from_a_read_only_model(tiny_model: Path, tmp_path: Path) -> None:
    """As a folder that a group shares is; root may write there anyway, so the modes are looked at."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    for path in (base, *base.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    config = model_config(base)
    adapter = DiffusionModelBase.get_class(config)
    module = adapter.load_transformer(config, torch.float32)
    make_trainable(adapter, module, config)
    export_weights(adapter, config, trainable(module), tmp_path / "weights")
    folders = [tmp_path / "weights", *(path for path in (tmp_path / "weights").rglob("*") if path.is_dir())]
    assert {path.name for path in folders} >= {"weights", "transformer", "vae", "scheduler"}
    assert {path.name: oct(path.stat().st_mode) for path in folders if path.stat().st_mode & 0o700 != 0o700} == {}
    assert base.stat().st_mode & 0o777 == 0o555
