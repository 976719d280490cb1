# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose denoiser is in another folder than `transformer`, or is built by a config.json elsewhere."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import load_file

from models.cost.meta_pass import pass_cost
from models.families.base import DiffusionModelConfig
from models.families.latents import transformer_config
from models.families.qwen_image import QwenImage
from models.rollout.diffusers import DiffusersRolloutEngine
from models.training.policy import load_teacher
from models.weights.trainable import check_initial_weights, export_weights, read_exported
from tests.models.training.test_engine import batch_of, trainer
from tests.support.helpers import model_config, rollout_request, save_tiny_model
from tests.support.tiny_models import embeddings_of

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`transformer` has two blocks; `transformer_ema`, which model_index.json does not name, has one, whose config.json
    is in `configs` as well; and `transformer_bare` has these weights and no config.json."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    small = save_tiny_model(tmp_path_factory.mktemp("small"), layers=1) / "transformer"
    shutil.copytree(small, folder / "transformer_ema")
    (folder / "configs").mkdir()
    shutil.copy(small / "config.json", folder / "configs")
    (folder / "transformer_bare").mkdir()
    shutil.copy(small / WEIGHTS, folder / "transformer_bare")
    return folder


PLACES = pytest.mark.parametrize("subfolder", ["transformer_ema", "transformer_bare"])


def placed(folder: Path, subfolder: str, **settings: Any) -> DiffusionModelConfig:
    built_by = {"config_path": str(folder / "configs")} if subfolder == "transformer_bare" else {}
    return model_config(folder, transformer_subfolder=subfolder, **built_by, **settings)


@PLACES
@pytest.mark.usefixtures("one_rank")
def test_rollout_update_and_export_have_its_weights(checkpoint: Path, subfolder: str, tmp_path: Path) -> None:
    """Both compute with one block, and the export is a folder in diffusers format with the trained one in its place."""
    config = placed(checkpoint, subfolder)
    stored = load_file(checkpoint / subfolder / WEIGHTS)
    rollout, engine = DiffusersRolloutEngine(config), trainer(config)
    assert {name: tuple(p.shape) for name, p in rollout.transformer.named_parameters()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    first = engine.gather_weights()
    assert all(torch.equal(first[name], tensor) for name, tensor in stored.items())
    _, paths = rollout.generate(rollout_request(lengths=(5, 3, 7)))
    metrics = engine.update_policy([batch_of(paths)])
    assert metrics["ratio_deviation/max"] < 1e-5, "the update computes what was sampled"

    trained = engine.gather_weights()
    export_weights(QwenImage, config, trained, tmp_path / "weights")
    assert not list(tmp_path.glob("weights/transformer_*"))
    loaded = QwenImagePipeline.from_pretrained(tmp_path / "weights").transformer
    assert len(loaded.transformer_blocks) == 1
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_parameters())
    read = read_exported(QwenImage, config, tmp_path / "weights")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in read.items())
    check_initial_weights(QwenImage, placed(checkpoint, subfolder, initial_weights=str(tmp_path / "weights")))
    teacher = load_teacher(QwenImage, config, str(tmp_path / "weights"))
    assert torch.equal(dict(teacher.named_parameters())[(name := next(iter(trained)))], trained[name])


@PLACES
def test_its_cost_is_that_of_its_own_config(checkpoint: Path, subfolder: str) -> None:
    whole, config = model_config(checkpoint), placed(checkpoint, subfolder)
    assert (transformer_config(whole)["num_layers"], transformer_config(config)["num_layers"]) == (2, 1)
    costs = [pass_cost(one, embeddings_of(one, lengths=(9,))) for one in (whole, config)]
    assert costs[1].parameters < costs[0].parameters
    assert costs[1].sampling_flops < 0.6 * costs[0].sampling_flops


def test_a_config_that_does_not_suit_the_weights_is_refused(checkpoint: Path) -> None:
    """Two blocks for the weights of one: diffusers would draw the other at random."""
    config = model_config(
        checkpoint, transformer_subfolder="transformer_bare", config_path=str(checkpoint / "transformer")
    )
    with pytest.raises(ValueError, match=r"lacks \d+ of the weights of QwenImageTransformer2DModel"):
        QwenImage.load_transformer(config, torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"transformer_subfolder": "transformer_3"},
            r"transformer_3, but .*/transformer_3 is no folder: name the one of",
        ),
        (
            {"transformer_subfolder": "transformer_bare"},
            r"transformer_bare, but .*/config.json does not exist: let model.config_path be the folder",
        ),
        ({"config_path": "nowhere"}, r"model.config_path is nowhere, but nowhere/config.json does not exist"),
    ],
)
def test_where_nothing_is_the_driver_says_so(checkpoint: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        model_config(checkpoint, **settings)


@pytest.mark.parametrize("name", ["../transformer", "/transformer", "a/b", ""])
def test_a_subfolder_is_one_of_the_models(checkpoint: Path, name: str) -> None:
    with pytest.raises(ValueError, match="transformer_subfolder"):
        model_config(checkpoint, transformer_subfolder=name)


def test_a_transformer_keeps_its_name(checkpoint: Path) -> None:
    """Of the joined folder, which is gone once it is loaded, nothing stays behind."""
    module: Any = QwenImage.load_transformer(placed(checkpoint, "transformer_bare"), torch.float32)
    assert isinstance(module, QwenImageTransformer2DModel)
    assert module.config._name_or_path == str(checkpoint)


def test_sharded_weights_are_found_too(checkpoint: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    (model / "transformer_bare" / WEIGHTS).unlink()
    ema: Any = QwenImageTransformer2DModel.from_pretrained(model, subfolder="transformer_ema")
    ema.save_pretrained(model / "transformer_bare", max_shard_size="20KB")
    (model / "transformer_bare" / "config.json").unlink()
    assert (model / "transformer_bare" / f"{WEIGHTS}.index.json").is_file()
    module = QwenImage.load_transformer(placed(model, "transformer_bare"), torch.float32)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), ema.parameters(), strict=True))
