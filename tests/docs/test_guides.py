# SPDX-License-Identifier: Apache-2.0
"""docs/add-a-model.md, followed literally: its family, outside of the project, samples, trains and exports."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import models.families.base
from flows.prepare import app
from models.cost.flops import step_flops
from models.cost.meta_pass import meta_transformer
from models.families import GROUP, _load_installed
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.samples.trajectories import RolloutRequest
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tasks.actors.rollout_worker import RolloutWorker
from tasks.config.recipes import load_recipe, parse_changes
from tasks.config.rollout import DiffusionRolloutConfig
from tasks.data.prompts import build_prompt_table
from tasks.run.preflight import check_inputs
from tests.models.families import test_model_conformance as suite
from tests.support import tiny_models
from tests.support.helpers import actor_config, gloo_world, model_config, noise_keys
from tests.support.tiny_models import Family, embeddings_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-model.md").read_text()
MODULE, NAME = "my_family", "aura_flow"
TEXT = 24


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Family, Path]]:
    """The page's two blocks where it says they go: my_family.py in a folder of the user's, and tiny_models.py."""
    module, tiny = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / f"{MODULE}.py").write_text(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(models.families.base._ADAPTERS, "entries", dict(models.families.base._ADAPTERS.entries))
        patch.setattr(tiny_models, "FAMILIES", dict(tiny_models.FAMILIES))
        exec(compile(tiny, "docs/add-a-model.md", "exec"), vars(tiny_models))
        yield tiny_models.FAMILIES[NAME], folder
        del sys.modules[MODULE]


@pytest.fixture(scope="module")
def checkpoint_of(family: tuple[Family, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    """What the conformance suite asks for."""
    checkpoint = suite.Checkpoint(family[0], tmp_path_factory.mktemp(NAME) / "model", {})
    return lambda name, scheduler="own": checkpoint


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("guided", [False, True], ids=["plain", "guided"])
def test_the_conformance_suite_passes(
    checkpoint_of: Callable[..., object], guided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for texts in (tiny_models.PROMPTS, tiny_models.PROMPTS[:1]):
        for size in (0, 1):
            suite.test_sampling_is_the_pipelines_own(checkpoint_of, NAME, "own", texts, size, guided)
    suite.test_replayed_log_probs_are_the_rollouts_own(checkpoint_of, NAME, "sde", guided)
    if guided:
        suite.test_prompt_guidance_and_schedule_change_the_picture(checkpoint_of, NAME)
        suite.test_guidance_without_a_negative_prompt(checkpoint_of, NAME)
        suite.test_encode_is_the_inverse_of_decode(checkpoint_of, NAME, monkeypatch)
        suite.test_prompt_lengths_are_those_that_the_encoder_keeps(checkpoint_of, NAME)
        suite.test_exported_weights_load_in_diffusers(checkpoint_of, NAME, suite.LORA, tmp_path)
    for weights in ({}, suite.LORA):
        if guided:
            suite.test_replay_in_bfloat16(checkpoint_of, NAME, weights)
        suite.test_one_update_moves_the_trained_weights_and_nothing_else(checkpoint_of, NAME, weights, guided)


def test_its_operations_are_those_that_torch_counts(checkpoint_of: Callable[..., suite.Checkpoint]) -> None:
    config = checkpoint_of(NAME).config(guided=True)
    prompts = embeddings_of(config, lengths=(TEXT,), negative_length=TEXT)
    adapter, index = DiffusionModelBase.get_class(config), torch.tensor([0])
    with torch.device("meta"):
        latents, timestep = torch.empty(1, *adapter.latent_shape(config)), torch.empty(1)
    module = meta_transformer(adapter, config)
    text = prompts.to("meta").expand(index.to("meta"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        adapter.predict_velocity(module, config, *adapter.model_inputs(module, config, latents, timestep, text))
    assert step_flops(config, TEXT) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_commands_of_the_page(
    family: tuple[Family, Path],
    checkpoint_of: Callable[..., suite.Checkpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`flows.prepare embeddings` with its arguments, and the settings of `flows.train` as far as the driver checks."""
    commands = PAGE.split("export PYTHONPATH=.")[1].split("```")[0].replace("\\\n", " ")
    (command,) = re.findall(r"-m flows.prepare (embeddings.*)", commands)
    (settings,) = re.findall(r"-m flows.train quickstart (.*)", commands)
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    (tmp_path / "raw.txt").write_text("".join(f"a sign with the number {i}\n" for i in range(14)))
    (tmp_path / "data").mkdir()
    build_prompt_table([str(tmp_path / "raw.txt")], n_test=1, n_train=None, seed=0, target_pattern=r"(\d+)").to_parquet(
        tmp_path / "data" / "prompts.parquet"
    )
    (tmp_path / "data" / NAME).symlink_to(checkpoint_of(NAME).folder)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    changes = parse_changes(re.findall(r"--set (\S+)", settings))
    inputs = check_inputs(load_recipe("quickstart", ROOT / "prefect.yaml").with_changes(changes))
    assert inputs.model_config.architecture == "AuraFlowPipeline"
    assert inputs.flops is not None
    unnamed = changes.model_copy(deep=True)
    unnamed.actor_rollout_ref.model.external_lib = "no_such_family"
    with pytest.raises(ValueError, match=r"model.external_lib names 'no_such_family', which cannot be imported"):
        check_inputs(load_recipe("quickstart", ROOT / "prefect.yaml").with_changes(unnamed))


def test_other_processes_find_the_family(
    family: tuple[Family, Path], checkpoint_of: Callable[..., suite.Checkpoint], tmp_path: Path
) -> None:
    """A rollout worker and a trainer rank that have not imported it; two optimiser steps."""
    config = checkpoint_of(NAME).config(external_lib=MODULE, **suite.LORA)
    ((known_before, first, second),) = gloo_world(trained, 1, tmp_path, config)
    assert not known_before
    assert first["ratio_deviation/max"] == 0.0
    assert second["ratio_deviation/max"] > 0.0


def trained(rank: int, config: DiffusionModelConfig) -> tuple[bool, dict[str, float], dict[str, float]]:
    """What a rollout worker sampled, learnt from twice."""
    known_before = ("AuraFlowPipeline", None) in models.families.base._ADAPTERS.entries
    rollout = RolloutWorker(config, DiffusionRolloutConfig(), "cpu")
    request = RolloutRequest(
        noise_keys(1, 4), embeddings_of(config, lengths=(TEXT,)), torch.zeros(4, dtype=torch.long), (0, 1)
    )
    trajectories, *_ = rollout.generate(request, None, None)
    engine = DiffusersFSDPEngine(config, actor_config())
    engine.initialize()
    batch = ActorBatch([(trajectories, torch.tensor([1.0, -1.0, 0.5, -0.5]))], 4)
    return known_before, engine.update_policy([batch]), engine.update_policy([batch])


def test_an_installed_package_needs_no_setting(
    family: tuple[Family, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata as an installer writes it, with the entry point of the page."""
    (section,) = re.findall(r"```toml\n\[project.entry-points.\"(.*?)\"\]\n(.*?)\n```", PAGE, re.DOTALL)
    assert section[0] == GROUP
    metadata = tmp_path / "aura-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: aura\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{section[0]}]\n{section[1].replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE)
    models.families.base._ADAPTERS.entries.pop(("AuraFlowPipeline", None))
    (tmp_path / "model_index.json").write_text('{"_class_name": "AuraFlowPipeline"}')
    _load_installed.cache_clear()
    assert DiffusionModelBase.get_class(model_config(tmp_path)).__module__ == MODULE
    _load_installed.cache_clear()
