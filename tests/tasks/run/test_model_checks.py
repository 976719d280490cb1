# SPDX-License-Identifier: Apache-2.0
"""What the driver says about a model, its settings and its embeddings before anything loads."""

import json
import platform
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from flows.prepare import app
from models.config.actor import DiffusionActorConfig
from models.families.latents import text_width
from models.import_paths import ALLOWED, ModuleNotAllowed
from models.schedulers import ReverseStep
from tasks.actors.interpreter import FIELD, check_interpreter
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.data.embeddings import PromptEmbeddings, write_embeddings
from tasks.data.prompts import build_prompt_table, load_prompts
from tasks.run.model_checks import check_fitting
from tasks.run.preflight import Inputs, check_inputs
from tests.support.helpers import edit_config, model_config
from tests.support.other_environment import make_environment
from tests.support.tiny_models import FAMILIES

EMBEDDINGS = {
    "qwen_image": "embeddings",
    "stable_diffusion_3": "pooled",
    "flux": "pooled_flux",
    "wan": "embeddings_wan",
}
"""Folder of each model's embeddings."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of three families, a prompt table, and embeddings with and without a pooled vector."""
    folder = tmp_path_factory.mktemp("checks")
    for name in ("qwen_image", "stable_diffusion_3", "flux", "wan"):
        FAMILIES[name].save(folder / name)
    (folder / "raw.txt").write_text("".join(f"a sign with the number {i}\n" for i in range(6)))
    build_prompt_table([str(folder / "raw.txt")], n_test=1, n_train=None, seed=0, target_pattern=None).to_parquet(
        folder / "prompts.parquet"
    )

    def encoder(model: str) -> Callable[[list[str]], dict[str, torch.Tensor]]:
        width = text_width(model_config(folder / model))

        def encode(texts: list[str]) -> dict[str, torch.Tensor]:
            made = {"prompt_embeds": torch.ones(len(texts), 3, width), "prompt_embeds_mask": torch.ones(len(texts), 3)}
            extras = FAMILIES[model].adapter.prompt_extras  # of the tiny models as wide as the text
            return made | {name: torch.ones(len(texts), width) for name in extras}

        return encode

    for model, name in EMBEDDINGS.items():
        write_embeddings(
            load_prompts(folder / "prompts.parquet"),
            encoder(model),
            folder / name,
            8,
            batch_size=4,
            negative_prompt="",
            max_sequence_length=24,
            model="",
            model_digest="",
        )
    return folder


def checked(
    workspace: Path,
    model: str,
    *,
    val: Any = None,
    algorithm: str = "flow_grpo",
    actor: Any = None,
    trainer: Any = None,
    algo: Any = None,
    products: Any = None,
    engine: str = "diffusers",
    **settings: Any,
):
    """`check_inputs` of a small run on two ranks with this model; `settings` are fields of rollout.pipeline."""
    family = FAMILIES[model]
    height, width = family.sizes[0]
    pipeline = {"height": height, "width": width} | family.plain | settings
    rollout = {
        "name": engine,
        "n": 2,
        "micro_batch_size": 2,
        "pipeline": pipeline,
        "algo": algo or {},
        "val_kwargs": {"pipeline": val or {}},
    }
    config = {
        "data": {
            "prompts": workspace / "prompts.parquet",
            "embeddings": workspace / EMBEDDINGS[model],
            "train_batch_size": 2,
        },
        "actor_rollout_ref": {
            "model": {"path": str(workspace / model)} | (products or {}),
            "rollout": rollout,
            "actor": {"ppo_mini_batch_size": 2} | (actor or {}),
        },
        "algorithm": {"name": algorithm},
        "reward": {"functions": {"jpeg_compressibility": {}}},
        "trainer": {"n_gpus_per_node": 2} | (trainer or {}),
    }
    return check_inputs(TrainConfig.model_validate(config))


@pytest.mark.parametrize("model", ["qwen_image", "stable_diffusion_3", "flux", "wan"])
def test_a_run_that_suits_its_model_starts(workspace: Path, model: str) -> None:
    assert isinstance(checked(workspace, model), Inputs)
    assert isinstance(checked(workspace, model, **FAMILIES[model].guided), Inputs)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            "qwen_image",
            {"guidance_scale": 4.0},
            r"guidance_scale is 4.0, which QwenImagePipeline .*reads true_cfg_scale",
        ),
        ("stable_diffusion_3", {"true_cfg_scale": 4.0}, r"true_cfg_scale is 4.0, which Stable.*reads guidance_scale"),
        ("stable_diffusion_3", {"num_frames": 5}, r"num_frames is 5, which StableDiffusion3Pipeline does not read"),
        ("stable_diffusion_3", {"height": 80}, r"height 80 and pipeline.width 24 must be at most 64"),
        ("flux", {"guidance_scale": None}, r"guidance_scale is null, but this model is distilled with one"),
        ("wan", {"num_frames": None}, r"num_frames is None: WanPipeline samples video"),
        ("wan", {"num_frames": 6}, r"num_frames is 6: .* of 1 frame and a multiple of 4"),
        ("qwen_image", {"max_sequence_length": 77}, r"max_sequence_length is 77, but .* was encoded with 24"),
    ],
)
def test_settings_that_do_not_suit_the_model(
    workspace: Path, model: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        checked(workspace, model, **settings)


@pytest.mark.parametrize(
    ("model", "engine", "products", "message"),
    [
        (
            "wan",
            "diffusers",
            {"fuse_projections": True, "lora_rank": 4},
            r"fuse_projections is true, but Wan does not say .* to false",
        ),
        (
            "qwen_image",
            "vllm_omni",
            {"frozen_dtype": "float8", "lora_rank": 4},
            r"frozen_dtype is float8, but rollout.name is vllm_omni, .*set rollout.name to diffusers",
        ),
    ],
)
def test_rollout_and_trainer_multiply_alike(
    workspace: Path, model: str, engine: str, products: dict[str, Any], message: str
) -> None:
    both = {"fuse_projections": True, "frozen_dtype": "float8", "lora_rank": 4}
    assert isinstance(checked(workspace, "stable_diffusion_3", products=both), Inputs)
    with pytest.raises(ValueError, match=message):
        checked(workspace, model, engine=engine, products=products)


@pytest.mark.parametrize("products", [{"transformer_subfolder": "transformer_ema"}, {"config_path": "given"}])
def test_another_denoiser_of_the_model_is_another_run_and_for_diffusers_alone(
    workspace: Path, tmp_path: Path, products: dict[str, str]
) -> None:
    """Its weights, or what builds it, are in the digest of what the run begins with."""
    usual = checked(workspace, "qwen_image")
    folder = workspace / "qwen_image"
    shutil.copytree(folder / "transformer", folder / "transformer_ema", dirs_exist_ok=True)
    given = products | ({"config_path": str(folder / "transformer_ema")} if "config_path" in products else {})
    other = checked(workspace, "qwen_image", products=given)
    assert other.digest != usual.digest
    file = folder / "transformer_ema" / "config.json"
    file.write_text(file.read_text() + "\n")
    assert checked(workspace, "qwen_image", products=given).digest != other.digest
    name = next(iter(given))
    with pytest.raises(ConfigError, match=rf"model.{name} is .*, but rollout.name is vllm_omni, .*or leave {name} out"):
        checked(workspace, "qwen_image", products=given, engine="vllm_omni")


def test_how_the_ranks_train_suits_the_model(workspace: Path) -> None:
    shared = {"fsdp_config": {"ulysses_sequence_parallel_size": 2}}
    assert isinstance(checked(workspace, "wan", actor=shared), Inputs)
    with pytest.raises(ValueError, match=r"the attention of StableDiffusion3Pipeline cannot be split here: set it to"):
        checked(workspace, "stable_diffusion_3", actor=shared)
    with pytest.raises(ValueError, match=r"size is 3: .*n_gpus_per_node 2 must be a multiple of it"):
        checked(workspace, "wan", actor={"fsdp_config": {"ulysses_sequence_parallel_size": 3}})
    with pytest.raises(ValueError, match=r"strategy is 'megatron'; known: fsdp2, veomni; or give package.module"):
        checked(workspace, "wan", actor={"strategy": "megatron"})


def test_a_training_engine_is_looked_for_where_the_trainers_actors_run(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VeOmni and an engine of one's own, without them and in an environment that has them."""
    python = make_environment(tmp_path / "venv", {"veomni/__init__.py": "", "only_there.py": ""})
    veomni = {"strategy": "veomni", "python": str(python)}
    assert isinstance(checked(workspace, "wan", actor=veomni), Inputs)
    assert isinstance(checked(workspace, "wan", actor=veomni | {"strategy": "only_there:Engine"}), Inputs)
    with pytest.raises(ValueError, match=r"actor.strategy is 'only_there:Engine', which cannot be imported"):
        checked(workspace, "wan", actor={"strategy": "only_there:Engine"})
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size is 2, which actor.strategy veomni cannot"):
        checked(workspace, "wan", actor=veomni | {"fsdp_config": {"ulysses_sequence_parallel_size": 2}})
    if find_spec("veomni") is None:
        with pytest.raises(ConfigError, match=r"actor.strategy is veomni, but veomni is not installed: install it, or"):
            checked(workspace, "wan", actor={"strategy": "veomni"})
    monkeypatch.setenv(ALLOWED, "mine")
    with pytest.raises(ModuleNotAllowed, match=rf"{FIELD} has .* run, as the config says"):
        checked(workspace, "wan", actor=veomni)
    monkeypatch.setenv(ALLOWED, f"mine,{python}")
    assert isinstance(checked(workspace, "wan", actor=veomni), Inputs)


def answering(file: Path, lines: str) -> Path:
    """A program that says these lines whatever it is asked."""
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    file.chmod(0o755)
    return file


def test_an_interpreter_that_cannot_run_the_trainer_is_refused_before_anything_loads(tmp_path: Path) -> None:
    bare = make_environment(tmp_path / "bare", {}, own_packages=False)
    older = answering(tmp_path / "older", '{"python": "3.1.0", "ray": null, "missing": []}')
    for python, strategy, said in (
        (tmp_path / "nowhere", "fsdp2", "which does not exist: give /folder/bin/python"),
        (answering(tmp_path / "greets", "hello"), "fsdp2", "which does not answer as an interpreter of Python"),
        (tmp_path / "raw.txt", "fsdp2", "which does not answer as an interpreter of Python"),
        (older, "fsdp2", f"which has python 3.1.0, but this run's is {platform.python_version()}"),
        (bare, "fsdp2", "which has ray None, but this run's is"),
        (make_environment(tmp_path / "venv", {}), "nobodys.engine:Engine", "whose environment lacks nobodys: install"),
    ):
        (tmp_path / "raw.txt").write_text("no program")
        with pytest.raises(ConfigError, match=f"{FIELD} is {python}, {said}"):
            check_interpreter(DiffusionActorConfig(python=str(python), strategy=strategy))


def test_validation_is_checked_like_the_rollout(workspace: Path) -> None:
    assert isinstance(checked(workspace, "stable_diffusion_3", val={"guidance_scale": 4.5}), Inputs)
    with pytest.raises(ValueError, match=r"true_cfg_scale is 4.0, which StableDiffusion3Pipeline does not read"):
        checked(workspace, "stable_diffusion_3", val={"true_cfg_scale": 4.0})


def changed_configs(workspace: Path, model: str, folder: Path, old: str, new: str) -> Path:
    """A workspace in `folder` whose `model` has config files with `new` in the place of `old`."""
    replaced = 0
    for name in ("model_index.json", "transformer/config.json", "vae/config.json"):
        text = (workspace / model / name).read_text()
        replaced += text.count(old)
        (folder / model / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / model / name).write_text(text.replace(old, new))
    assert replaced == 1
    (folder / model / "scheduler").symlink_to(workspace / model / "scheduler")
    for name in ("prompts.parquet", *EMBEDDINGS.values()):
        (folder / name).symlink_to(workspace / name)
    return folder


def test_a_distilled_scale_for_a_model_without_one(workspace: Path, tmp_path: Path) -> None:
    schnell = changed_configs(workspace, "flux", tmp_path, '"guidance_embeds": true', '"guidance_embeds": false')
    with pytest.raises(ValueError, match=r"guidance_scale is 3.5, but this model is not distilled with one"):
        checked(schnell, "flux")
    assert isinstance(checked(schnell, "flux", guidance_scale=None), Inputs)


def test_a_model_with_two_denoisers(workspace: Path, tmp_path: Path) -> None:
    two = changed_configs(workspace, "wan", tmp_path, '"boundary_ratio": null', '"boundary_ratio": 0.9')
    with pytest.raises(ValueError, match=r"has two denoisers .*use a Wan model with one"):
        checked(two, "wan")


def of_negative_noise(sample, velocity, sigma, sigma_next, sigma_max, noise_level):  # type: ignore[no-untyped-def]
    """A step whose length, below 0, was taken for the square root of its size."""
    return ReverseStep(sample + velocity * (sigma_next - sigma), noise_level * (sigma_next - sigma))


def that_fades_out(sample, velocity, sigma, sigma_next, sigma_max, noise_level):  # type: ignore[no-untyped-def]
    """Without noise from the level .5 on."""
    return ReverseStep(sample + velocity * (sigma_next - sigma), noise_level * (sigma - 0.5).clamp(min=0))


@pytest.mark.parametrize(
    ("kernel", "window", "message"),
    [
        (
            of_negative_noise,
            [0, 2],
            r"no finite log-prob at step 0 of \[0, 2\), noise level 1, where .*is -0\.\d+: it must",
        ),
        (
            that_fades_out,
            [0, 9],
            r"no finite log-prob at step 7 of \[0, 9\), noise level 0\.465, where .*is 0: it must",
        ),
        (that_fades_out, [0, 2], None),
    ],
)
def test_a_step_without_a_log_prob_is_refused(
    workspace: Path, kernel: Any, window: list[int], message: str | None
) -> None:
    """It would make every sample of the first iteration one that is not finite, which says nothing of the kernel."""
    algo = {"sde_type": f"{__name__}:{kernel.__name__}", "noise_level": 0.1, "sde_window_range": window}
    if message is None:
        assert isinstance(checked(workspace, "stable_diffusion_3", algo=algo, num_inference_steps=10), Inputs)
        return
    with pytest.raises(ConfigError, match=f"{kernel.__name__} has {message}"):
        checked(workspace, "stable_diffusion_3", algo=algo, num_inference_steps=10)


def test_a_window_whose_noise_would_stay_is_refused(workspace: Path) -> None:
    """The last steps are the model's own schedule's: Wan's go from 0.40 to 0.02 to 0."""
    loud: dict[str, Any] = {"algorithm": "dance_grpo", "num_inference_steps": 10}
    message = (
        r"noise of standard deviation 1\.07 in the finished latents, more than rollout.algo.max_leftover_noise 0.5: 9 "
        r"steps of \[0, 9\) of 10 with dance_sde at noise_level 1.2; let sde_window_range end earlier or lower"
    )
    with pytest.raises(ConfigError, match=message):
        checked(workspace, "wan", algo={"noise_level": 1.2}, **loud)
    for right in ({"sde_window_size": 2, "sde_window_range": [0, 5]}, {"max_leftover_noise": 1.1}):
        assert isinstance(checked(workspace, "wan", algo={"noise_level": 1.2} | right, **loud), Inputs)
    public = {"sde_type": "sde", "noise_level": 0.7}
    assert isinstance(checked(workspace, "stable_diffusion_3", algo=public, num_inference_steps=10), Inputs)
    assert isinstance(checked(workspace, "wan", algo={"sde_type": "cps", "noise_level": 0.8}), Inputs)


@pytest.mark.parametrize(
    ("kernel", "why"),
    [("sde", "would leave its noise"), ("dance_sde", "would leave its noise"), ("cps", "no gradient")],
)
def test_a_sampler_of_one_step_cannot_explore(workspace: Path, kernel: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"num_inference_steps is 1, but loss flow_grpo .* {why}.* take at least 2"):
        checked(workspace, "qwen_image", algo={"sde_type": kernel}, num_inference_steps=1)
    finished = checked(workspace, "qwen_image", algorithm="diffusion_nft", num_inference_steps=1)
    assert isinstance(finished, Inputs)


def test_a_schedule_that_has_no_numbers_is_refused(workspace: Path, tmp_path: Path) -> None:
    """Qwen-Image's published one, which is stretched to end at .02, is NaN where its last level is its first."""
    for path in workspace.iterdir():
        if path.name != "qwen_image":
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(workspace / "qwen_image", tmp_path / "qwen_image")
    edit_config(tmp_path / "qwen_image/scheduler/scheduler_config.json", shift_terminal=0.02)
    message = r"gives the noise levels \[nan, 0.0\] for num_inference_steps 1: take more steps"
    with pytest.raises(ConfigError, match=message):
        checked(tmp_path, "qwen_image", algorithm="diffusion_nft", num_inference_steps=1)
    with pytest.raises(ConfigError, match=message):
        checked(tmp_path, "qwen_image", val={"num_inference_steps": 1})
    assert isinstance(checked(tmp_path, "qwen_image", algorithm="diffusion_nft", num_inference_steps=2), Inputs)


def test_the_last_step_of_cps_alone_trains_nothing(workspace: Path) -> None:
    cps: dict[str, Any] = {"sde_type": "cps", "sde_window_range": [2, 4]}
    with pytest.raises(
        ConfigError, match=r"\[2, 4\) with one trained step may choose the last of 4, .*let it end at 3"
    ):
        checked(workspace, "qwen_image", algo=cps | {"sde_window_size": 1}, num_inference_steps=4)
    assert isinstance(checked(workspace, "qwen_image", algo=cps, num_inference_steps=4), Inputs)


def test_the_public_kl_is_for_kernels_with_a_step_length(workspace: Path) -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_type": "flow_grpo"}
    assert isinstance(checked(workspace, "qwen_image", actor=kl), Inputs)
    with pytest.raises(ConfigError, match=r"kl_loss_type is flow_grpo, .* but sde_type is cps, .* use gaussian"):
        checked(workspace, "qwen_image", actor=kl, algo={"sde_type": "cps", "noise_level": 0.8})
    with pytest.raises(ConfigError, match=r"kl_loss_type is flow_grpo, but with loss diffusion_nft .* leave it out"):
        checked(workspace, "qwen_image", algorithm="diffusion_nft", actor=kl)


def test_losses_of_the_forward_process_train_without_guidance(workspace: Path) -> None:
    for model in ("qwen_image", "stable_diffusion_3"):
        assert isinstance(checked(workspace, model, algorithm="diffusion_nft"), Inputs)
        field = FAMILIES[model].adapter.pipeline_fields[0]
        with pytest.raises(ConfigError, match=rf"pipeline.{field} asks for guidance, but loss diffusion_nft"):
            checked(workspace, model, algorithm="diffusion_nft", **FAMILIES[model].guided)


def test_the_command_encodes_with_any_model(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pooled vectors and its limit are stored, and a run with that model takes them."""
    params = yaml.safe_load((Path(__file__).parents[3] / "params.yaml").read_text())
    params["data_sets"]["digits"]["embeddings"] |= {"negative_prompt": "ugly"}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    (tmp_path / "data").mkdir()
    for name in ("prompts.parquet", "data/prompts.parquet"):
        (tmp_path / name).symlink_to(workspace / "prompts.parquet")
    (tmp_path / "stable_diffusion_3").symlink_to(workspace / "stable_diffusion_3")
    monkeypatch.chdir(tmp_path)
    arguments = ["embeddings", "--model", "stable_diffusion_3", "--out", "pooled", "--max-sequence-length"]
    short = CliRunner().invoke(app, [*arguments, "8"])
    assert short.exit_code == 2
    assert "tokens with its template, but max_sequence_length=8" in short.output
    result = CliRunner().invoke(app, [*arguments, "24"])
    assert result.exit_code == 0, result.output
    embeddings = PromptEmbeddings.open("pooled")
    assert (embeddings.extras, embeddings.max_sequence_length) == (("pooled_prompt_embeds",), 24)
    assert json.loads((tmp_path / "pooled" / "index.json").read_text())["negative_prompt"] == "ugly"
    assert isinstance(checked(tmp_path, "stable_diffusion_3", max_sequence_length=24), Inputs)


def test_embeddings_of_another_model(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "pooled").symlink_to(workspace / "embeddings")
    for name in ("prompts.parquet", "stable_diffusion_3"):
        (tmp_path / name).symlink_to(workspace / name)
    with pytest.raises(ConfigError, match=r"lacks pooled_prompt_embeds: encode the prompts with .*stable_diffusion_3"):
        checked(tmp_path, "stable_diffusion_3")
    (tmp_path / "pooled").unlink()
    (tmp_path / "pooled").symlink_to(workspace / "pooled_flux")
    with pytest.raises(ConfigError, match=r"pooled holds vectors of 16 numbers, but the transformer of .* takes 32"):
        checked(tmp_path, "stable_diffusion_3")


def test_a_run_that_cannot_fit_is_refused_before_anything_loads(workspace: Path, tmp_path: Path) -> None:
    """Half a MiB is too little for the tiny model; its weights are not there."""
    for name in ("prompts.parquet", "embeddings"):
        (tmp_path / name).symlink_to(workspace / name)
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(workspace / "qwen_image", tmp_path / "qwen_image", ignore=ignored)
    on_cpu = checked(tmp_path, "qwen_image")
    assert on_cpu.flops is not None
    with pytest.raises(
        ValueError, match=r"the update needs 0.0 GiB .* but there are 0.0: train LoRA with model.lora_rank"
    ):
        checked(tmp_path, "qwen_image", trainer={"device": "cuda", "gpu_memory_gib": 0.0005})


def with_another_config(model: Path, folder: Path, component: str, **fields: Any) -> str:
    """The model's folder with these fields of one component's config changed."""
    edit_config(shutil.copytree(model, folder) / component / "config.json", **fields)
    return str(folder)


@pytest.mark.parametrize(
    ("model", "component", "fields", "said"),
    [
        ("qwen_image", "transformer", {"num_layers": 3}, r"transformer_blocks.2.\S+ is not there and should be \["),
        ("qwen_image", "transformer", {"attention_head_dim": 32}, r"\S+ is \[.*\] and should be \["),
        ("flux", "vae", {"layers_per_block": 2}, r"encoder.down_blocks.0.resnets.1.\S+ is not there and should be \["),
    ],
)
def test_weights_of_another_config_are_refused_on_the_driver(
    workspace: Path, tmp_path: Path, model: str, component: str, fields: dict[str, int], said: str
) -> None:
    """A rollout worker that loads them would say so, when Ray has started and the others load."""
    path = with_another_config(workspace / model, tmp_path / model, component, **fields)
    where = rf"^model.path is {path}, whose {component} does not fit {component}/config.json: "
    with pytest.raises(ConfigError, match=where + said):
        checked(workspace, model, products={"path": path})


def test_text_encoders_that_do_not_load_need_not_fit(workspace: Path, tmp_path: Path) -> None:
    path = with_another_config(workspace / "flux", tmp_path / "flux", "text_encoder_2", num_layers=3)
    assert isinstance(checked(workspace, "flux", products={"path": path}), Inputs)


def test_an_adapter_that_loads_weights_in_its_own_way_is_left(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_another_config(workspace / "flux", tmp_path / "flux", "vae", layers_per_block=2)
    adapter = FAMILIES["flux"].adapter
    monkeypatch.setattr(adapter, "load_vae", classmethod(lambda cls, model_config: None), raising=False)
    assert isinstance(checked(workspace, "flux", products={"path": path}), Inputs)


@pytest.mark.parametrize("trains", [True, False])
def test_what_another_engine_alone_reads_is_left(workspace: Path, tmp_path: Path, trains: bool) -> None:
    """What is trained is loaded by diffusers, too."""
    path = with_another_config(workspace / "qwen_image", tmp_path / "model", "transformer", num_layers=3)
    base = {"model": {"path": path}, "rollout": {"name": "vllm_omni"}}
    config = TrainConfig.model_validate({"actor_rollout_ref": base, "reward": {"functions": {"brightness": {}}}})
    if not trains:
        check_fitting(config, model_config(path), trains)
        return
    with pytest.raises(ValueError, match=r"transformer does not fit"):
        check_fitting(config, model_config(path), trains)
