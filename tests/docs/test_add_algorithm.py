# SPDX-License-Identifier: Apache-2.0
"""The worked example of docs/algorithms.md, as a user's own file: its very code and settings train a model."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.algorithms import check_advantage, check_loss_inputs
from models.config.algo import DiffusionRolloutAlgoConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.schedulers import FlowMatchSDEDiscreteScheduler, ReverseStep, kernels, register_kernel
from models.schedulers.kernels import KERNELS, check_kernel, gaussian_log_prob, get_kernel
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tasks.config.presets import PRESETS
from tasks.config.recipes import load_recipe, parse_changes
from tasks.run.loss_checks import check_loss
from tasks.stages.advantage import compute_advantage
from tests.support.helpers import actor_config, model_config, rollout_request

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
RECIPES = Path(__file__).parents[2] / "prefect.yaml"
SHIPPED = [name for name, kernel in KERNELS.items() if kernel.step.__module__ == "models.schedulers.kernels"]
CLIP = 0.2


@pytest.fixture
def users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's Python block as my_research.py, importable."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_research.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_research", None)


@pytest.mark.usefixtures("users_file", "one_rank")
def test_the_example_trains(tiny_model: Path) -> None:
    """With the page's settings; the second update's loss is the formula at the moved weights."""
    section = PAGE.split("## Add an algorithm")[1].split("**Options**")[0]
    (recipe,) = re.findall(r"-m flows\.train (\S+)", section)
    config = load_recipe(recipe, RECIPES).with_changes(parse_changes(re.findall(r"--set (\S+)", section)))
    check_loss(config)
    loss, algo = config.actor_rollout_ref.actor.diffusion_loss, config.actor_rollout_ref.rollout.algo
    assert (loss.options, config.algorithm.adv_options, algo.sde_options) == (
        {"width": 2.0},
        {"scale": 1.5},
        {"power": 0.5},
    )
    check_loss_inputs(loss.loss_mode, use_kl_loss=False, options=loss.options)
    check_advantage(config.algorithm.adv_estimator, config.algorithm.adv_options)
    check_kernel(algo.sde_type, algo.sde_options)
    rewards, uids = np.array([0.1, 0.9, 7.0, 0.3, 0.2, np.nan], np.float32), np.array(list("aaabbb"))
    data = {"sample_level_rewards": rewards, "uid": uids}
    advantages = compute_advantage(data, config.algorithm.adv_estimator, config=config.algorithm)["advantages"]
    assert advantages[:5].tolist() == [-1.5, 0, 1.5, 1.5, -1.5]
    assert np.isnan(advantages[5])

    model = model_config(tiny_model, sde_type=algo.sde_type, sde_options=algo.sde_options)
    settings = {"loss_mode": loss.loss_mode, "options": loss.options, "clip_ratio": CLIP}
    engine = DiffusersFSDPEngine(model, actor_config(**settings, ppo_micro_batch_size_per_gpu=6))
    engine.initialize()
    _, trajectories = DiffusersRolloutEngine(model).generate(rollout_request(lengths=(5, 3, 7)))
    assert trajectories is not None
    of_another_power = replace(model, algo=model.algo.model_copy(update={"sde_options": {}}))
    assert not torch.equal(
        DiffusersRolloutEngine(of_another_power).generate(rollout_request(lengths=(5, 3, 7)))[1].log_probs,
        trajectories.log_probs,
    )
    batch = ActorBatch([(trajectories, torch.tensor(advantages))], 5)
    first = engine.update_policy([batch])
    assert first["pg_loss"] == first["saturated"] == 0.0
    moved = engine.rescored(trajectories).log_probs
    second = engine.update_policy([batch])
    ratio = torch.exp(moved - trajectories.log_probs)[:5]
    eps = 2.0 * CLIP
    expected = -(torch.tensor(advantages[:5])[:, None] * eps * torch.tanh((ratio - 1) / eps)).mean()
    assert second["pg_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert second["pg_loss"] < 0  # the first step went where the advantages point
    assert 0 < second["saturated"] < 1


def test_the_page_names_every_algorithm_and_kernel() -> None:
    algorithms = PAGE.split("## The algorithms")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", algorithms, re.MULTILINE) == list(PRESETS)
    section = PAGE.split("## Kernels")[1].split("## Windows")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {"sde_type", *SHIPPED}


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(kernels._REGISTRY, "entries", dict(KERNELS))
    monkeypatch.setattr(kernels, "KERNELS", kernels._REGISTRY.entries)


@pytest.mark.usefixtures("own_kernels")
def test_a_registered_kernel_brings_its_log_prob(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name and by its import path alike, and the scheduler uses both; another function may not take the name."""

    @register_kernel("doubled", log_prob=lambda prev_sample, step: prev_sample.flatten(1).sum(1))
    def doubled(sample, velocity, sigma, sigma_next, sigma_max, noise_level):
        return ReverseStep(2 * sample, sigma)

    scheduler = FlowMatchSDEDiscreteScheduler()
    scheduler.set_timesteps(4)
    x = torch.tensor([[1.0, 2.0]])
    monkeypatch.setitem(globals(), "doubled", doubled)
    for name in ("doubled", f"{__name__}:doubled"):
        _, log_prob, mean, _ = scheduler.sample_previous_step(x, x, sde_type=name, prev_sample=3 * x)
        assert torch.equal(mean, 2 * x)
        assert log_prob.tolist() == [9.0]
    with pytest.raises(ValueError, match=r"kernel 'doubled' is already registered as .*doubled"):
        register_kernel("doubled")(kernels.sde_step)


def test_a_kernel_that_is_not_registered_is_gaussian() -> None:
    assert get_kernel(f"{__name__}:still") == (still, gaussian_log_prob)
    assert get_kernel("models.schedulers.kernels:cps_step") == KERNELS["cps"]


def still(sample, velocity, sigma, sigma_next, sigma_max, noise_level, *, slope, **rest):
    return ReverseStep(sample, sigma)


def test_options_that_a_function_does_not_name_are_refused() -> None:
    """Also where it takes any keyword; and one that it cannot do without is asked for."""
    check_kernel(f"{__name__}:still", {"slope": 1.0})
    with pytest.raises(ValueError, match=r"algo.sde_options has curve, but kernel '.*:still' takes slope"):
        check_kernel(f"{__name__}:still", {"slope": 1.0, "curve": 2.0})
    with pytest.raises(ValueError, match=r"algo.sde_options has sigma_max, but"):
        check_kernel(f"{__name__}:still", {"slope": 1.0, "sigma_max": 2.0})
    with pytest.raises(ValueError, match=r"algo.sde_options lacks slope, without which kernel '.*:still' cannot be"):
        check_kernel(f"{__name__}:still", {})


def test_the_forms_examples_are_the_shipped_kernels() -> None:
    assert sorted(DiffusionRolloutAlgoConfig.model_fields["sde_type"].examples) == sorted(SHIPPED)
