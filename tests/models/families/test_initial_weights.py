# SPDX-License-Identifier: Apache-2.0
"""A run that starts from another run's weights: what it then trains, what it compares with, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flows.lora_for_server import convert
from models.families.base import DiffusionModelConfig
from models.families.qwen_image import QwenImage
from models.rollout.diffusers import DiffusersRolloutEngine
from models.weights.trainable import check_initial_weights, export_weights, make_trainable, trainable
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.run.model_checks import check_stored
from tasks.run.preflight import check_weights
from tests.models.training.test_engine import batch_of, largest_difference, trainer
from tests.support.helpers import model_config, rollout_request
from tests.support.published_models import MODELS
from tests.support.tiny_models import FAMILIES

KINDS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora_rank": 4, "lora_alpha": 8}}
full_and_lora = pytest.mark.parametrize("kind", KINDS)
SETTINGS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ppo_micro_batch_size_per_gpu": 6}


def rolled_out(config: DiffusionModelConfig, weights: dict[str, Tensor]) -> Any:
    rollout = DiffusersRolloutEngine(config)
    rollout.load_weights(weights)
    return rollout.generate(rollout_request(lengths=(5, 3, 7)))[1]


@pytest.fixture(scope="module")
def tiny_model(one_block_model: Path) -> Path:
    """One block is enough here."""
    return one_block_model


@pytest.fixture(scope="module")
def exported(one_rank: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each kind what a run of two updates left behind."""
    folder, found = tmp_path_factory.mktemp("exported"), {}
    for kind, settings in KINDS.items():
        config = model_config(tiny_model, **settings)
        engine = trainer(config)
        _, paths = DiffusersRolloutEngine(config).generate(rollout_request(lengths=(5, 3, 7)))
        for _ in range(2):
            engine.update_policy([batch_of(paths)])
        found[kind] = folder / kind
        export_weights(QwenImage, config, engine.gather_weights(), folder / kind)
        torch.save(engine.gather_weights(), folder / f"{kind}.pt")
    return found


@full_and_lora
def test_training_starts_from_them_and_refers_to_the_base_model(
    tiny_model: Path, exported: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    """Policy and average begin there, to the bit; the KL is to the base model, so it is not 0; another lr is free."""
    before = torch.load(exported[kind].with_suffix(".pt"))
    config = model_config(tiny_model, **KINDS[kind], initial_weights=str(exported[kind]))
    engine = trainer(config, lr=1e-3, enable=True, **SETTINGS)
    base = trainer(model_config(tiny_model, **KINDS[kind]), **SETTINGS)
    assert largest_difference(engine.gather_weights(), before) == 0.0
    assert largest_difference(base.gather_weights(), before) > 1e-3
    with engine.holding("average"):
        assert largest_difference(engine.gather_weights(), before) == 0.0
    trajectories = rolled_out(config, before)
    first = engine.update_policy([batch_of(trajectories)])
    assert first["logprob_abs_diff/max"] == 0.0
    assert first["optimizer_steps"] == 1
    assert first["kl_loss"] > 1e-6
    assert base.update_policy([batch_of(rolled_out(config, base.gather_weights()))])["kl_loss"] == 0.0
    export_weights(QwenImage, config, engine.gather_weights(), tmp_path / "again")
    check_initial_weights(QwenImage, model_config(tiny_model, **KINDS[kind], initial_weights=str(tmp_path / "again")))


@full_and_lora
def test_a_checkpoint_wins_over_them(tiny_model: Path, exported: dict[str, Path], kind: str, tmp_path: Path) -> None:
    config = model_config(tiny_model, **KINDS[kind], initial_weights=str(exported[kind]))
    engine, resumed = trainer(config), trainer(config)
    engine.update_policy([batch_of(rolled_out(config, engine.gather_weights()))])
    engine.save_checkpoint(tmp_path / "checkpoint")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert largest_difference(resumed.gather_weights(), engine.gather_weights()) == 0.0


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("nowhere", {}, r"initial_weights is .*nowhere, which holds neither pytorch_lora.* nor transformer/: give the"),
        ("lora", {}, r"holds LoRA weights, but model.lora_rank is 0, which trains all: give an export of the same"),
        ("full", KINDS["lora"], r"holds full weights, but model.lora_rank is 4: give an export of the same kind"),
        ("lora", {"lora_rank": 2, "lora_alpha": 8}, r"trained with lora_rank 4, but model.lora_rank is 2: .* the same"),
        ("lora", {"lora_rank": 4, "lora_alpha": 4}, r"trained with lora_alpha 8, but model.lora_alpha is 4"),
        ("lora", KINDS["lora"] | {"target_modules": ("to_q",)}, r"with target_modules \[.*, but .* is \['to_q'\]"),
    ],
)
def test_weights_that_this_run_cannot_train_are_refused(
    tiny_model: Path, exported: dict[str, Path], kind: str, settings: dict[str, Any], message: str
) -> None:
    folder = exported.get(kind, exported["full"].with_name(kind))
    with pytest.raises(ValueError, match=message):
        check_initial_weights(QwenImage, model_config(tiny_model, **settings, initial_weights=str(folder)))


FULL_FILE, LORA_FILE = "transformer/diffusion_pytorch_model.safetensors", "pytorch_lora_weights.safetensors"


def cut_off(file: Path) -> None:
    """A copy that ended early: the header is whole, the last weights are not."""
    file.write_bytes(file.read_bytes()[:-100])


def leave_a_pointer(file: Path) -> None:
    """What git-lfs has in the place of a file that was not fetched."""
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")


def list_another_file(file: Path) -> None:
    """Of two shards one is there."""
    index = {"weight_map": {"one": file.name, "two": "diffusion_pytorch_model-00002-of-00002.safetensors"}}
    file.with_name("diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def drop_a_weight(file: Path) -> None:
    """Another version of the class has written it."""
    tensors = load_file(file)
    del tensors["proj_out.weight"]
    save_file(tensors, file)


def shorten_a_weight(file: Path) -> None:
    """As a model of another vocabulary has it."""
    tensors = load_file(file)
    save_file(tensors | {"proj_out.weight": tensors["proj_out.weight"][1:].clone()}, file)


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("full", cut_off, rf"{FULL_FILE} cannot be read \(.*\): fetch or export it again"),
        ("full", leave_a_pointer, rf"{FULL_FILE} cannot be read \(.*\): fetch or export it again"),
        ("full", list_another_file, r"transformer/diffusion_pytorch_model-00002-of-00002.safetensors is missing"),
        (
            "full",
            Path.unlink,
            r"not whole: .* is not there and should be \[\d+.*\] \(\d+ in all differ\): fetch or exp",
        ),
        (
            "full",
            drop_a_weight,
            r"not whole: proj_out.weight is not there and should be \[\d+, \d+\] \(1 in all differ",
        ),
        ("full", shorten_a_weight, r"not whole: proj_out.weight is \[\d+, \d+\] and should be \[\d+, \d+\] \(1 in all"),
        ("lora", cut_off, rf"{LORA_FILE} cannot be read \(.*\): fetch or export it again"),
        ("lora", leave_a_pointer, rf"{LORA_FILE} cannot be read \(.*\): fetch or export it again"),
    ],
)
def test_damaged_weights_are_refused_before_a_worker_loads_them(
    tiny_model: Path,
    exported: dict[str, Path],
    kind: str,
    damage: Callable[[Path], None],
    message: str,
    tmp_path: Path,
) -> None:
    shutil.copytree(exported[kind], tmp_path / kind)
    check_weights(model_config(tiny_model, **KINDS[kind]), tmp_path / kind)
    damage(tmp_path / kind / {"full": FULL_FILE, "lora": LORA_FILE}[kind])
    with pytest.raises(ConfigError, match=message) as refused:
        check_weights(model_config(tiny_model, **KINDS[kind]), tmp_path / kind)
    assert str(refused.value).startswith(f"weights is {tmp_path / kind}, whose ")


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_a_model_whose_files_are_cut_off_is_refused(tiny_model: Path, component: str, tmp_path: Path) -> None:
    """A worker that dies of it has told no more than that it died."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    check_stored(model_config(folder), encodes=True)
    (file,) = (folder / component).glob("*.safetensors")
    cut_off(file)
    with pytest.raises(ValueError, match=rf"^model.path is {folder}, whose {component}/{file.name} cannot be read"):
        check_stored(model_config(folder), encodes=True)


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_a_model_whose_weights_are_a_variant_alone_is_refused(tiny_model: Path, component: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (file,) = (folder / component).glob("*.safetensors")
    file.rename(file.with_suffix(".fp16.safetensors"))
    with pytest.raises(ConfigError, match=rf"whose {component} has its weights in a variant alone \({file.stem}.fp16"):
        check_stored(model_config(folder), encodes=True)


def test_shards_of_text_encoders_may_be_missing_where_embeddings_are_on_disk(tiny_model: Path, tmp_path: Path) -> None:
    """Who fetches only what is loaded has their index all the same, which is a small file."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    file.unlink()
    index = {"weight_map": {"embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "text_encoder" / "model.safetensors.index.json").write_text(json.dumps(index))
    check_stored(model_config(folder), encodes=False)
    with pytest.raises(ValueError, match=r"text_encoder/model-00001-of-00002.safetensors is missing"):
        check_stored(model_config(folder), encodes=True)


def test_weights_of_another_model_are_refused(exported: dict[str, Path], tmp_path: Path) -> None:
    FAMILIES["qwen_image"].save(tmp_path / "model")
    file = tmp_path / "model" / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_layers": 3, "guidance_embeds": True}))
    config = model_config(tmp_path / "model", initial_weights=str(exported["full"]))
    with pytest.raises(ValueError, match=r"differs from that of model.path .* in guidance_embeds, num_layers: give"):
        check_initial_weights(QwenImage, config)


@pytest.mark.parametrize(
    ("name", "model", "field"),
    [
        ("qwen_image", "qwen-image", "zero_cond_t"),
        ("flux", "flux.1-dev", "num_layers"),
        ("stable_diffusion_3", "sd3.5-medium", "qk_norm"),
        ("z_image", "z-image", "rope_theta"),
        ("wan", "wan2.2-ti2v-5b", "added_kv_proj_dim"),
    ],
)
def test_an_export_is_of_the_model_whose_published_config_holds_fewer_fields(
    tiny_folder: Callable[[str], Path], name: str, model: str, field: str, tmp_path: Path
) -> None:
    """An export has every field of the class. One that the class does not know stays in both."""
    family, base = FAMILIES[name], tmp_path / "base"
    shutil.copytree(tiny_folder(name), base)
    file = base / "transformer" / "config.json"
    whole = json.loads(file.read_text())
    held = {key: value for key, value in whole.items() if key in MODELS[model].transformer} | {"of_the_future": None}
    assert held.keys() < {*whole, "of_the_future"}, "the class has fields that the published file lacks"
    file.write_text(json.dumps(held))
    (height, width), _ = family.sizes
    settings = {"height": height, "width": width} | family.plain
    config = model_config(base, **settings)
    weights = {n: p.data for n, p in family.adapter.load_transformer(config, config.dtype).named_parameters()}
    export_weights(family.adapter, config, weights, tmp_path / "weights")
    started = model_config(base, **settings, initial_weights=str(tmp_path / "weights"))
    check_initial_weights(family.adapter, started)
    exported = tmp_path / "weights" / "transformer" / "config.json"
    for other in ({field: 3}, {"of_the_future": 1}):
        changed = json.loads(exported.read_text()) | other
        exported.with_name("before.json").write_text(exported.read_text())
        exported.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=rf"differs from that of model.path .* in {next(iter(other))}: give"):
            check_initial_weights(family.adapter, started)
        exported.write_text(exported.with_name("before.json").read_text())
    file.write_text(json.dumps({key: value for key, value in held.items() if key != "of_the_future"}))
    with pytest.raises(ValueError, match="in of_the_future: give"):  # null there, nothing here
        check_initial_weights(family.adapter, started)


def test_lora_weights_that_do_not_say_what_they_are(
    tiny_model: Path, exported: dict[str, Path], tmp_path: Path
) -> None:
    name = "pytorch_lora_weights.safetensors"
    save_file(load_file(exported["lora"] / name), tmp_path / name)
    with pytest.raises(ValueError, match=r"safetensors does not say its r: give an export .*, A LoRA of another tool"):
        check_initial_weights(QwenImage, model_config(tiny_model, **KINDS["lora"], initial_weights=str(tmp_path)))


def test_the_documented_lines_make_initial_weights_of_a_lora_of_peft(
    one_rank: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = get_peft_model(
        QwenImage.load_transformer(model_config(tiny_model), torch.float32),
        LoraConfig(r=3, lora_alpha=5, target_modules=["attn.to_q", "attn.to_v"], init_lora_weights=False),
    )
    theirs.save_pretrained(tmp_path / "theirs")
    section = Path("docs/training.md").read_text().split("### A LoRA of another tool")[1]
    lines = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert lines
    monkeypatch.chdir(tmp_path)
    exec(lines[1], {})
    settings = {"lora_rank": 3, "lora_alpha": 5, "target_modules": ("attn.to_q", "attn.to_v")}
    config = model_config(tiny_model, **settings, initial_weights=str(tmp_path / "theirs_for_doubleflow"))
    check_initial_weights(QwenImage, config)
    own = trainer(config).gather_weights()
    before = {
        name.removeprefix("base_model.model."): weight
        for name, weight in theirs.named_parameters()
        if weight.requires_grad
    }
    assert own.keys() == before.keys()
    assert largest_difference(own, before) == 0.0


def test_an_export_of_many_targets_is_of_the_run_that_made_it(tiny_model: Path, tmp_path: Path) -> None:
    """Of twenty names and more peft makes shorter ones; a name may also stand there twice."""
    whole = QwenImage.load_transformer(model_config(tiny_model), torch.float32)
    names = [name for name, module in whole.named_modules() if isinstance(module, torch.nn.Linear)]
    for number, targets in enumerate((names, ["attn.to_q", "attn.to_q"])):
        config = model_config(tiny_model, **KINDS["lora"], target_modules=tuple(targets))
        module = QwenImage.load_transformer(config, torch.float32)
        make_trainable(QwenImage, module, config)
        export_weights(QwenImage, config, trainable(module), tmp_path / str(number))
        check_weights(config, tmp_path / str(number))
    assert len(names) >= 20


@pytest.mark.parametrize("other", [{"use_rslora": True}, {"alpha_pattern": {"attn.to_q": 32}}])
def test_a_lora_that_another_tool_scales_by_another_number_is_refused(
    tiny_model: Path, exported: dict[str, Path], tmp_path: Path, other: dict[str, Any]
) -> None:
    with safe_open(exported["lora"] / LORA_FILE, "pt") as file:
        said = json.loads(file.metadata()["lora_adapter_metadata"])
    changed = said | {f"transformer.{name}": value for name, value in other.items()}
    (tmp_path / "other").mkdir()
    save_file(
        load_file(exported["lora"] / LORA_FILE),
        tmp_path / "other" / LORA_FILE,
        {"format": "pt", "lora_adapter_metadata": json.dumps(changed)},
    )
    with pytest.raises(ConfigError, match=f"was trained with {next(iter(other))}, so that it is scaled by another"):
        check_weights(model_config(tiny_model, **KINDS["lora"]), tmp_path / "other")
    with pytest.raises(ConfigError, match=f"was trained with {next(iter(other))}"):
        convert(tmp_path / "other", tmp_path / "served", tiny_model)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 2, r"transformer_blocks.1.attn.add_k_proj.lora_A.weight is not there and should be \[4, 32\]"),
        ("num_attention_heads", 8, r"attn.add_k_proj.lora_A.weight is \[4, 32\] and should be \[4, 128\] \(\d+ in all"),
    ],
)
def test_a_lora_of_another_model_is_refused_by_a_run_and_for_a_server(
    tiny_model: Path, exported: dict[str, Path], tmp_path: Path, field: str, value: int, message: str
) -> None:
    """A server would leave out what it does not find."""
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model" / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    config = model_config(tmp_path / "model", **KINDS["lora"], initial_weights=str(exported["lora"]))
    with pytest.raises(ValueError, match=message):
        check_initial_weights(QwenImage, config)
    with pytest.raises(ConfigError, match=f"WEIGHTS is .*lora, whose pytorch_lora.* is of another model .*{message}"):
        convert(exported["lora"], tmp_path / "served", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    convert(exported["lora"], tmp_path / "served", tiny_model)
    assert (tmp_path / "served" / "adapter_config.json").is_file()


def test_weights_to_be_measured_are_looked_at_likewise(tiny_model: Path, exported: dict[str, Path]) -> None:
    config = model_config(tiny_model, **KINDS["lora"])
    check_weights(config, exported["lora"])
    with pytest.raises(ConfigError, match=r"^weights is .*/full, which holds full weights, but model.lora_rank is 4"):
        check_weights(config, exported["full"])
    with pytest.raises(ConfigError, match=r"^weights is \., which holds neither pytorch_lora.* nor transformer/"):
        check_weights(config, Path(""))


def test_they_make_another_run_and_are_among_what_it_reads() -> None:
    plain, started = (
        TrainConfig.model_validate({"actor_rollout_ref": {"model": {"initial_weights": given}}})
        for given in (None, "runs/other/weights")
    )
    assert plain.digest() != started.digest()
    assert Path("runs/other/weights") in started.data_read()
    assert len(plain.data_read()) == len(started.data_read()) - 1
