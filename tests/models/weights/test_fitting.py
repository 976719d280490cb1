# SPDX-License-Identifier: Apache-2.0
"""Weights that do not fit their config are refused by the headers of their files, and none that loads is."""

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.families.base import DiffusionModelBase
from models.families.loading import text_encoder_classes
from models.weights.fitting import check_network, check_text_encoders
from models.weights.stored import is_stored_in
from tests.support.helpers import edit_config, model_config
from tests.support.published_layout import LAYOUTS, save_both
from tests.support.published_models import MODELS
from tests.support.tiny_models import FAMILIES

GIVEN = "model.path is here"
DIFFUSERS, TRANSFORMERS = "diffusion_pytorch_model", "model"
SHARD = 5 * 10**9
QWEN_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
QWEN_7B |= {"num_key_value_heads": 4, "vocab_size": 152064}
T5_XXL = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24}


def check(folder: Path) -> None:
    for component in ("transformer", "vae"):
        check_network(folder, component, GIVEN)
    check_text_encoders(folder, GIVEN)


def load(folder: Path) -> None:
    """As rollout and trainer do."""
    config = model_config(folder)
    adapter = DiffusionModelBase.get_class(config)
    adapter.load_transformer(config, torch.float32)
    adapter.load_vae(config)
    adapter.load_text_pipeline(folder)


def shard(component: Path, stem: str) -> dict[str, torch.Tensor]:
    """Write the single file's tensors as two files and an index, too, and return them."""
    tensors, names = load_file(component / f"{stem}.safetensors"), {}
    for number in (0, 1):
        file = f"{stem}-0000{number + 1}-of-00002.safetensors"
        own = dict(sorted(tensors.items())[number::2])
        save_file(own, component / file, metadata={"format": "pt"})
        names |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": names}
    (component / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return tensors


@pytest.fixture
def copied(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Name of a family -> its tiny checkpoint, to be changed."""
    return lambda family: shutil.copytree(tiny_folder(family), tmp_path / "model")


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers says what it does, as where no setting silences it."""
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture(autouse=True)
def _none_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No component is passed over because it could not be built without data."""
    with caplog.at_level(logging.DEBUG, "models.weights.fitting"):
        yield
    assert [record for record in caplog.records if record.name == "models.weights.fitting"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_said_of_weights_that_fit(tiny_folder: Callable[[str], Path], family: str) -> None:
    before = torch.get_rng_state()
    check(tiny_folder(family))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_said_of_the_published_layouts(layout: str, tmp_path: Path) -> None:
    """With shards, variants, older names, outputs that no encoder has, and configs that leave fields out."""
    _, published = save_both(layout, tmp_path)
    check(published)


@pytest.mark.parametrize(
    ("family", "component", "fields", "said"),
    [
        ("qwen_image", "transformer", {"num_layers": 3}, r"transformer_blocks.2.\S+ is not there and should be \[\d+"),
        ("qwen_image", "transformer", {"num_attention_heads": 4}, r"\S+ is \[\d+.*\] and should be \[\d+.*\]"),
        ("stable_diffusion_3", "transformer", {"num_layers": 4}, r"transformer_blocks.2.\S+ is .* and should be \["),
        ("flux", "transformer", {"num_single_layers": 3}, r"single_transformer_blocks.2.\S+ is not there and should"),
        ("z_image", "transformer", {"n_layers": 3}, r"layers.2.\S+ is not there and should be \["),
        ("wan", "transformer", {"ffn_dim": 64}, r"blocks.0.ffn.net.0.proj.weight is \[48, 24\] and should be \[64, 24"),
        ("flux", "vae", {"layers_per_block": 2}, r"encoder.down_blocks.0.resnets.1.\S+ is not there and should be \["),
        ("wan", "vae", {"z_dim": 8}, r"\S+ is \[8, .*\] and should be \[16, .*\]"),
        ("flux", "text_encoder", {"num_hidden_layers": 3}, r"encoder.layers.2.\S+ is not there and should be \["),
        ("flux", "text_encoder", {"hidden_size": 24}, r"\S+ is \[74, 16\] and should be \[74, 24\]"),
        ("flux", "text_encoder_2", {"num_layers": 3}, r"encoder.block.1.\S+ is not there and should be \["),
        ("wan", "text_encoder", {"d_model": 24}, r"shared.weight is \[54, 16\] and should be \[54, 24\]"),
        ("z_image", "text_encoder", {"hidden_size": 24}, r"embed_tokens.weight is \[\d+, 16\] and should be \[\d+, 24"),
    ],
)
def test_weights_of_another_config_are_refused(
    copied: Callable[[str], Path],
    family: str,
    component: str,
    fields: Mapping[str, Any],
    said: str,
    capfd: pytest.CaptureFixture[str],
    talkative: None,
) -> None:
    """As what loads them would, which knows it in a worker alone."""
    folder = copied(family)
    edit_config(folder / component / "config.json", **fields)
    where = rf"^{GIVEN}, whose {component} does not fit {component}/config.json"
    with pytest.raises(ValueError, match=rf"{where}: {said}.* \(\d+ in all differ\): give the config"):
        check(folder)
    assert capfd.readouterr() == ("", ""), "neither transformers' report nor its bar"
    assert transformers.logging.get_verbosity() == logging.WARNING
    with pytest.raises((ValueError, RuntimeError)):
        load(folder)


def test_a_config_that_its_class_refuses_is_told(copied: Callable[[str], Path]) -> None:
    """It lists the kind of each layer, and now one more is asked for."""
    folder = copied("z_image")
    edit_config(folder / "text_encoder" / "config.json", num_hidden_layers=3)
    said = r"whose text_encoder/config.json is none of a Qwen3Model \(.*num_hidden_layers.*\): give the config.json"
    with pytest.raises(ValueError, match=said) as refused:
        check(folder)
    assert "\n" not in str(refused.value)
    with pytest.raises(Exception, match=r"num_hidden_layers"):
        load(folder)


def test_a_text_encoder_that_transformers_does_not_have_is_told(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen_image")
    index = json.loads((folder / "model_index.json").read_text())
    index["text_encoder"] = ["transformers", "TheNextModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"gives text_encoder the class TheNextModel, which transformers \S+ does not"):
        check_text_encoders(folder, "model.path is here")


def test_another_folder_for_the_config_is_the_one_that_is_compared(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen_image")
    (folder / "other").mkdir()
    shutil.copy(folder / "transformer" / "config.json", folder / "other")
    check_network(folder, "transformer", GIVEN, str(folder / "other"))
    edit_config(folder / "other" / "config.json", num_layers=3)
    with pytest.raises(ValueError, match=rf"whose transformer does not fit {folder}/other/config.json: transformer_bl"):
        check_network(folder, "transformer", GIVEN, str(folder / "other"))


@pytest.mark.parametrize(
    ("family", "component", "fields"),
    [("flux", "transformer", {"num_layers": 1}), ("flux", "text_encoder", {"num_hidden_layers": 1})],
)
def test_weights_that_the_config_does_not_ask_for_are_left(
    copied: Callable[[str], Path], family: str, component: str, fields: Mapping[str, Any]
) -> None:
    """Both libraries load the others."""
    folder = copied(family)
    edit_config(folder / component / "config.json", **fields)
    check(folder)
    load(folder)


@pytest.mark.parametrize(("component", "stem"), [("transformer", DIFFUSERS), ("text_encoder", TRANSFORMERS)])
def test_shards_are_read_as_one(copied: Callable[[str], Path], component: str, stem: str) -> None:
    folder = copied("flux")
    shard(folder / component, stem)
    (folder / component / f"{stem}.safetensors").unlink()
    check(folder)
    edit_config(folder / component / "config.json", **{"num_layers" if stem == DIFFUSERS else "num_hidden_layers": 3})
    with pytest.raises(ValueError, match=rf"{component} does not fit"):
        check(folder)


@pytest.mark.parametrize(("component", "stem"), [("transformer", DIFFUSERS), ("text_encoder", TRANSFORMERS)])
@pytest.mark.parametrize("damaged", ["single", "shards"])
def test_of_a_single_file_and_shards_those_count_that_the_library_reads(
    copied: Callable[[str], Path], component: str, stem: str, damaged: str
) -> None:
    """diffusers reads the index's, transformers the single file."""
    folder = copied("flux")
    tensors = shard(folder / component, stem)
    name = sorted(tensors)[0]
    file = f"{stem}.safetensors" if damaged == "single" else f"{stem}-00001-of-00002.safetensors"
    held = load_file(folder / component / file)
    save_file(held | {name: torch.zeros(3)}, folder / component / file, metadata={"format": "pt"})
    if (damaged == "single") == (stem == DIFFUSERS):
        check(folder)
        load(folder)
        return
    with pytest.raises(ValueError, match=rf"{name} is \[3\] and should be"):
        check(folder)


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_nothing_is_said_where_a_library_alone_can_read_the_weights(
    copied: Callable[[str], Path], component: str
) -> None:
    """Pickled ones; and a variant, which is not loaded, does not stand for them."""
    folder = copied("flux")
    edit_config(folder / component / "config.json", **({"layers_per_block": 2} if component == "vae" else {}))
    (file,) = (folder / component).glob("*.safetensors")
    pickled = "pytorch_model.bin" if component == "text_encoder" else "diffusion_pytorch_model.bin"
    torch.save(load_file(file), folder / component / pickled)
    save_file({"other": torch.zeros(1)}, file.with_name(f"{file.stem}.fp16.safetensors"))
    file.unlink()
    check(folder)


@pytest.mark.parametrize(
    ("formats", "kept"),
    [
        ({"model": [torch.bfloat16]}, True),
        ({"model": [torch.bfloat16, torch.float32]}, False),
        ({"model-1": [torch.bfloat16], "model-2": [torch.float32]}, False),
        ({"model": [torch.bfloat16], "model.fp32": [torch.float32]}, True),  # which nothing reads
        ({"model": [torch.float16]}, False),
        ({}, False),
    ],
)
def test_weights_are_stored_in_a_format_where_all_of_them_are(
    tmp_path: Path, formats: dict[str, list[torch.dtype]], kept: bool
) -> None:
    """The trainer then reads them in it; a single one of more digits would begin rounded."""
    for stem, stored in formats.items():
        weights = {str(number): torch.ones(2, dtype=dtype) for number, dtype in enumerate(stored)}
        save_file(weights, tmp_path / f"{stem}.safetensors")
    assert is_stored_in(tmp_path, torch.bfloat16) is kept


def test_nothing_is_said_of_quantised_weights(copied: Callable[[str], Path]) -> None:
    """They have other shapes and names."""
    folder = copied("flux")
    for component, fields in (("transformer", {"num_layers": 3}), ("text_encoder", {"num_hidden_layers": 3})):
        file = folder / component / "config.json"
        edit_config(file, **fields)
        quantised = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        file.write_text(json.dumps(json.loads(file.read_text()) | quantised))
    check(folder)


def without_data(component: Path, stem: str, module: torch.nn.Module) -> None:
    """A published model's safetensors files: this module's weights in bf16 in shards, whose data is a hole."""
    tied = set(getattr(module, "all_tied_weights_keys", {}))
    shapes = {name: list(weight.shape) for name, weight in module.state_dict().items() if name not in tied}
    shards: list[dict[str, Any]] = [{}]
    end = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if end + size > SHARD:
            shards, end = [*shards, {}], 0
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    names = {}
    for number, header in enumerate(shards, 1):
        file = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (component / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in header.values()))
        names |= dict.fromkeys(header, file)
    (component / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_it_is_published_fits(name: str, tmp_path: Path) -> None:
    """And one with a layer more does not."""
    folder = tmp_path / "transformer"
    folder.mkdir()
    config = MODELS[name].transformer
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        module = getattr(diffusers, config["_class_name"]).from_config(config)
    without_data(folder, DIFFUSERS, module)
    check_network(tmp_path, "transformer", GIVEN)
    layers = "n_layers" if "n_layers" in config else "num_layers"
    edit_config(folder / "config.json", **{layers: config[layers] + 1})
    with pytest.raises(ValueError, match=r"transformer does not fit .*: \S*blocks|layers\S* is not there"):
        check_network(tmp_path, "transformer", GIVEN)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Qwen2_5_VLForConditionalGeneration", transformers.Qwen2_5_VLConfig(text_config=QWEN_7B)),
        ("T5EncoderModel", transformers.T5Config(**T5_XXL, feed_forward_proj="gated-gelu")),
        ("UMT5EncoderModel", transformers.UMT5Config(**T5_XXL, vocab_size=256384)),
        ("Qwen3Model", transformers.Qwen3Config(hidden_size=2560, num_hidden_layers=36)),
    ],
)
def test_a_text_encoder_as_it_is_published_fits(kind: str, config: Any, tmp_path: Path) -> None:
    folder = tmp_path / "text_encoder"
    config.save_pretrained(folder)
    (tmp_path / "model_index.json").write_text(json.dumps({"text_encoder": ["transformers", kind]}))
    with torch.device("meta"):
        module = text_encoder_classes(tmp_path)["text_encoder"](config)
    without_data(folder, TRANSFORMERS, module)
    check_text_encoders(tmp_path, GIVEN)
