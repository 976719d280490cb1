# SPDX-License-Identifier: Apache-2.0
"""One name selects kernel, window, advantage and loss; what is given beside it wins; what is wrong is said early."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.config.algorithm import DiffusionAlgoConfig
from tasks.config.errors import ConfigError
from tasks.config.overrides import flat
from tasks.config.presets import PRESETS, decided_by_name, tree_of
from tasks.config.recipes import load_recipe, parse_changes
from tasks.config.tree import TrainConfig, TrainOverrides
from tasks.run.preflight import check_inputs

ROOT = Path(__file__).parents[3]
ACTOR = "actor_rollout_ref.actor"


def named(name: str, **sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"algorithm": {"name": name}} | sections)


def changed(*settings: str, of: TrainConfig | None = None) -> TrainConfig:
    """As `--set` does it."""
    return (of or TrainConfig()).with_changes(parse_changes(list(settings)))


def test_a_name_without_end_is_not_repeated_whole() -> None:
    with pytest.raises(ValueError, match=r"algorithm.name is 'a+\.\.\.a+'; known: ") as told:
        named("a" * 5000)
    assert len(str(told.value)) < 1000


def parts(config: TrainConfig) -> dict[str, Any]:
    algo, loss = config.actor_rollout_ref.rollout.algo, config.actor_rollout_ref.actor.diffusion_loss
    return {
        "adapter": config.actor_rollout_ref.model.algorithm,
        "kernel": (algo.sde_type, algo.noise_level),
        "window": (algo.sde_window_size, algo.sde_window_range),
        "advantage": config.algorithm.adv_estimator,
        "loss": (loss.loss_mode, loss.clip_ratio),
        "kl": config.actor_rollout_ref.actor.kl_loss_coef if config.actor_rollout_ref.actor.use_kl_loss else None,
        "trained on": (config.algorithm.trainer_type, config.algorithm.paired_preference),
        "levels": (config.algorithm.timestep_sampling, config.algorithm.num_train_timesteps),
        "old policy": config.algorithm.old_policy_decay_schedule,
    }


FLOW_GRPO: dict[str, Any] = {
    "adapter": "flow_grpo",
    "kernel": ("sde", 0.7),
    "window": (None, None),
    "advantage": "flow_grpo",
    "loss": ("flow_grpo", 1e-4),
    "kl": None,
    "trained on": ("policy_gradient", False),
    "levels": ("schedule", None),
    "old policy": "copy",
}
FINISHED = {"trained on": ("direct_preference", False)}
EXPECTED: dict[str, dict[str, Any]] = {
    "flow_grpo": {},
    "dance_grpo": {"kernel": ("dance_sde", 0.3)},
    "mix_grpo": {"window": (2, (0, 5))},
    "grpo_guard": {"loss": ("grpo_guard", 2e-6)},
    "flow_dppo": {"loss": ("flow_dppo", 1e-4)},
    "dpo": {
        "loss": ("dpo", 1e-4),
        "trained on": ("direct_preference", True),
        "levels": ("logit_normal", None),
    },
    "diffusion_nft": FINISHED | {"loss": ("diffusion_nft", 1e-4), "kl": 1e-4, "old policy": "linear_to_0_5"},
    "awm": FINISHED | {"loss": ("awm", 1.0), "kl": 1e-3, "old policy": "linear_to_0_3"},
    "distill_kl": {"loss": ("distill_kl", 1e-4)},
    "distill_fm_mse": FINISHED | {"loss": ("distill_fm_mse", 1e-4)},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_brings_its_parts(name: str) -> None:
    assert parts(named(name)) == FLOW_GRPO | {"adapter": name} | EXPECTED[name]


def test_what_is_given_wins_and_the_rest_follows() -> None:
    algo = {"noise_level": 1.2, "sde_window_range": [1, 4]}
    config = named("mix_grpo", actor_rollout_ref={"rollout": {"algo": algo}, "model": {"algorithm": "flow_grpo"}})
    assert parts(config) == FLOW_GRPO | {"kernel": ("sde", 1.2), "window": (2, (1, 4))}


def test_sections_that_are_objects_count_by_the_fields_they_were_given() -> None:
    algorithm = DiffusionAlgoConfig(name="dance_grpo")
    assert TrainConfig(algorithm=algorithm) == named("dance_grpo")


def test_a_default_given_by_hand_wins_too() -> None:
    """flow_grpo's own value, written out, is not taken for an absent one."""
    config = named("dance_grpo", actor_rollout_ref={"rollout": {"algo": {"sde_type": "sde"}}})
    assert parts(config)["kernel"] == ("sde", 0.3)


RECIPES = [
    deployment["name"]
    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    if deployment["entrypoint"] == "flows/train.py:train"
]


@cache
def recipe_of(name: str) -> TrainConfig:
    """A recipe of the project; read once, as a config cannot be changed."""
    return load_recipe(name, ROOT / "prefect.yaml")


def decided(config: TrainConfig, name: str) -> dict[str, Any]:
    """All that a name speaks for: whole sections and single fields."""
    values = flat(config.model_dump())
    below = tuple(decided_by_name(name))
    return {
        path: value for path, value in values.items() if path in below or path.startswith(tuple(f"{p}." for p in below))
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", PRESETS)
def test_another_name_on_a_recipe_is_that_algorithm_as_published(recipe: str, name: str) -> None:
    """By --set, by a deployment's overrides and by a sweep, whatever the recipe says of the same things."""
    config = recipe_of(recipe)
    if config.algorithm.name == name:
        assert changed(f"algorithm.name={name}", of=config) == config  # it is what the recipe chose, and set up
        return
    beside = {  # dpo-offline's pairs are no part of an algorithm, and some have no place in a recipe's batches or steps
        "algorithm.sample_source": "online",
        "actor_rollout_ref.rollout.pipeline.num_inference_steps": 10,
        "actor_rollout_ref.rollout.micro_batch_size": config.actor_rollout_ref.rollout.n,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
    }
    changes = {"algorithm.name": name} | beside
    results = [
        changed(*(f"{path}={value}" for path, value in changes.items()), of=config),
        config.with_changes(TrainOverrides.model_validate(tree_of(changes))),
        config.with_changes(tree_of(beside)).with_changes(tree_of({"algorithm.name": name})),
    ]
    assert results[0] == results[1] == results[2]
    assert decided(results[0], name) == decided(named(name), name)
    kept = {"trainer", "data", "reward", "tracking", "ray_init"}
    assert results[0].model_dump(include=kept) == config.model_dump(include=kept)
    assert results[0].actor_rollout_ref.actor.optim == config.actor_rollout_ref.actor.optim


def test_what_the_changes_say_themselves_counts_beside_the_name() -> None:
    recipe = recipe_of("flow-grpo")
    awm = changed("algorithm.name=awm", f"{ACTOR}.diffusion_loss.clip_ratio=0.5", of=recipe)
    assert parts(awm)["loss"] == ("awm", 0.5)
    dance = changed("algorithm.name=dance_grpo", "actor_rollout_ref.rollout.algo={sde_window_range: [0, 2]}", of=recipe)
    assert parts(dance)["kernel"] == ("dance_sde", 0.3)
    assert parts(dance)["window"] == (None, (0, 2))


def test_what_is_added_to_a_loss_does_not_follow_to_another() -> None:
    recipe = changed("algorithm.name=diffusion_nft", f"{ACTOR}.matching_loss_coef=0.5")
    change = parse_changes(["algorithm.name=awm"])
    assert recipe.with_changes(change).actor_rollout_ref.actor.matching_loss_coef == 0
    assert recipe.left_behind(change)[f"{ACTOR}.matching_loss_coef"] == (0.5, 0.0)
    assert changed("algorithm.name=diffusion_nft", of=recipe) == recipe


def test_what_is_kept_of_advantages_does_not_follow_to_pairs() -> None:
    """Which would be the best and the worst of advantages that it makes equal; offline there are none."""
    recipe = changed("algorithm.name=diffusion_nft", "algorithm.adv_mode=one_only")
    change = parse_changes(["algorithm.name=dpo"])
    assert recipe.with_changes(change).algorithm.adv_mode == "continuous"
    assert recipe.left_behind(change)["algorithm.adv_mode"] == ("one_only", "continuous")
    with pytest.raises(ValueError, match="adv_mode is one_only, but a loss that compares pairs"):
        changed("algorithm={name: dpo, adv_mode: one_only}", of=recipe)


def test_what_is_left_behind_for_a_name_is_told() -> None:
    recipe = recipe_of("flow-grpo")
    behind = recipe.left_behind(parse_changes(["algorithm.name=awm", "actor_rollout_ref.rollout.algo.noise_level=0.1"]))
    assert behind == {
        "actor_rollout_ref.rollout.algo.sde_window_range": ((0, 4), None),
        f"{ACTOR}.diffusion_loss.clip_ratio": (1e-3, 1.0),
    }
    assert recipe.left_behind(parse_changes(["trainer.seed=1"])) == recipe.left_behind(None) == {}


def test_another_name_later_takes_its_own_values() -> None:
    """Given or not, what the first name spoke for goes; without another name it stays."""
    config = named("mix_grpo", actor_rollout_ref={"rollout": {"algo": {"noise_level": 1.1}}})
    assert parts(changed("algorithm.name=grpo_guard", of=config)) == FLOW_GRPO | {
        "adapter": "grpo_guard",
        "loss": ("grpo_guard", 2e-6),
    }
    later = changed("actor_rollout_ref.rollout.algo.sde_window_size=3", of=config)
    assert parts(later)["window"] == (3, (0, 5))
    assert parts(later)["kernel"] == ("sde", 1.1)


def test_changes_keep_what_the_recipe_said() -> None:
    recipe = recipe_of("flow-grpo")
    config = changed("trainer.seed=3", of=recipe)
    assert config.model_dump(exclude={"trainer"}) == recipe.model_dump(exclude={"trainer"})
    assert config.trainer.seed == 3


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.name is 'grpo'; known: flow_grpo, dance_grpo, mix_grpo, grpo_gu"):
        named("grpo")
    with pytest.raises(ValueError, match=r"algorithm\.name is 'grpo_gaurd'; known: .*; did you mean grpo_guard\?"):
        named("grpo_gaurd")
    with pytest.raises(ValueError, match=r"algorithm\.name is \['awm'\]; known"):
        TrainConfig.model_validate({"algorithm": {"name": ["awm"]}})


# ---- the run's name


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_and_its_fields_written_out_are_one_run(name: str) -> None:
    config = named(name)
    written_out = config.model_dump(mode="json")
    del written_out["algorithm"]["name"]
    assert TrainConfig.model_validate(written_out).run_name == config.run_name
    assert TrainConfig.model_validate(config.model_dump(mode="json")).run_name == config.run_name
    assert changed(f"algorithm.name={name}").run_name == config.run_name


def test_every_algorithm_is_a_run_of_its_own() -> None:
    assert len({named(name).run_name for name in PRESETS}) == len(PRESETS)


@pytest.mark.parametrize(
    "setting",
    [
        "actor_rollout_ref.rollout.algo.sde_window_mode=progressive",
        "actor_rollout_ref.rollout.algo.iters_per_group=3",
        "actor_rollout_ref.rollout.algo.sde_contiguous=false",
        "actor_rollout_ref.actor.diffusion_loss.kl_mask_threshold=0.1",
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.timestep_fraction=0.5",
        "algorithm.old_policy_update_interval=2",
        "actor_rollout_ref.rollout.algo.noise_level=1.2",
    ],
)
def test_a_setting_that_shapes_the_weights_names_another_run(setting: str) -> None:
    base = named("mix_grpo")
    assert changed(setting, of=base).digest() != base.digest()


OPTIM = f"{ACTOR}.optim"


@pytest.mark.parametrize(
    ("settings", "paced"),
    [
        ((), None),
        (("actor_rollout_ref.rollout.algo.sde_window_mode=decay",), "sde_window_mode decay"),
        ((f"{OPTIM}.lr_scheduler_type=cosine",), "lr_scheduler_type cosine"),
        ((f"{OPTIM}.lr_scheduler_type=cosine", f"{OPTIM}.total_training_steps=50"), None),
        ((f"{OPTIM}.lr_scheduler_type=inverse_sqrt",), None),
        (
            (
                f"{OPTIM}.lr_scheduler_type=warmup_stable_decay",
                f"{OPTIM}.lr_scheduler_kwargs={{num_stable_steps: 9, num_decay_steps: 3}}",
            ),
            None,
        ),
    ],
)
def test_only_what_paces_itself_by_its_length_makes_another_run_of_a_longer_one(
    settings: tuple[str, ...], paced: str | None
) -> None:
    one = changed(*settings, of=named("mix_grpo"))
    longer = changed("trainer.total_training_steps=999", of=one)
    assert one.paced_by_length == paced
    assert (longer.digest() == one.digest()) == (paced is None)


# ---- misuse, before anything loads


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("actor_rollout_ref.rollout.n=1",), "rollout.n is 1: flow_grpo compares the samples"),
        (("algorithm.name=grpo_guard", "actor_rollout_ref.rollout.algo.noise_level=0"), "loss grpo_guard needs it"),
        (("algorithm.name=mix_grpo", "actor_rollout_ref.rollout.pipeline.num_inference_steps=4"), r"\[0, 5\) must lie"),
        (("algorithm.name=mix_grpo", "actor_rollout_ref.rollout.algo.sde_window_size=6"), "6 is longer than"),
        (("algorithm.rollout_correction.rollout_is=step",), "set bypass_mode to false"),
        (
            ("algorithm.name=distill_kl", "actor_rollout_ref.rollout.algo.noise_level=0", f"{ACTOR}.teacher_path=t"),
            "loss distill_kl needs it above 0",
        ),
        (("algorithm.name=diffusion_nft", "actor_rollout_ref.rollout.n=1"), "rollout.n is 1: flow_grpo compares"),
        (
            ("algorithm.name=diffusion_nft", "algorithm.sample_source=offline"),
            r"paired_preference is false: use a loss that compares pairs \(algorithm.name dpo\) or sample online",
        ),
        (
            ("algorithm.name=dpo", f"{ACTOR}.ppo_micro_batch_size_per_gpu=5"),
            "is 5: loss dpo compares pairs and needs an",
        ),
        (
            ("algorithm.name=dpo", "actor_rollout_ref.rollout.micro_batch_size=24"),
            "micro_batch_size 24 must be a multiple of rollout.n 16: loss dpo looks for its pairs",
        ),
        (
            ("algorithm.name=dpo", "algorithm.sample_source=offline", "trainer.n_gpus_per_node=3"),
            r"ppo_mini_batch_size 16 \(pairs\) must be a multiple of the 3 trainer ranks",
        ),
        (
            ("algorithm.name=awm", "algorithm.num_train_timesteps=6", "algorithm.timestep_fraction=0.5"),
            "num_train_timesteps is 6, but timestep_fraction 0.5 of 10 steps leaves 5",
        ),
        (
            ("algorithm.name=awm", "algorithm.num_train_timesteps=11"),
            "is 11, but timestep_fraction 1.0 of 10 steps leav",
        ),
        (
            ("algorithm.name=awm", "algorithm.num_train_timesteps=6", f"{ACTOR}.levels_per_pass=4"),
            "levels_per_pass is 4, which does not divide the 6 noise levels of a sample: give a divisor",
        ),
        (
            (f"{ACTOR}.levels_per_pass=2",),
            "levels_per_pass is 2, which does not divide the 9 trained steps of a sample",
        ),
        (
            ("algorithm.name=dpo", "algorithm.timestep_fraction=0.5"),
            "timestep_fraction 0.5 is a share of the schedule's levels, but timestep_sampling is logit_normal",
        ),
        (
            ("algorithm.name=awm", "algorithm.logit_normal_shift=3"),
            "logit_normal_shift is 3, but timestep_sampling schedule takes the schedule's levels",
        ),
        (
            ("algorithm.name=awm", "algorithm.rollout_correction.bypass_mode=false"),
            "bypass_mode is false, but loss awm reads no log-probs that could be corrected",
        ),
        (
            ("trainer.full_determinism=true", "actor_rollout_ref.rollout.name=vllm_omni"),
            "full_determinism is true, but actor_rollout_ref.rollout.name is vllm_omni",
        ),
        (
            ("actor_rollout_ref.rollout.cuda_graphs=true",),
            "rollout.cuda_graphs is true, but trainer.device is cpu: set it to false, or trainer.device to cuda",
        ),
        (
            ("reward.functions.ocr.placement=colocated",),
            "reward.functions.ocr.placement is colocated, on the trainer ranks' GPUs, but trainer.device is cpu: set",
        ),
        (
            ("actor_rollout_ref.rollout.algo={sde_type: cps, noise_level: 1.2}",),
            r"noise_level is 1\.2, but cps takes .* give it at most 1",
        ),
        ((f"{ACTOR}.kl_loss_type=flow_grpo",), "kl_loss_type is flow_grpo but use_kl_loss is false, so there is no KL"),
        (
            (f"{OPTIM}.lr_scheduler_type=cosin",),
            "lr_scheduler_type is 'cosin'; known: constant, constant_with_warmup, ",
        ),
        ((f"{OPTIM}.lr_scheduler_type=greedy",), "greedy, which a falling loss would pace: .* Choose among constant, "),
        (
            (f"{OPTIM}.lr_scheduler_kwargs.power=2",),
            r"lr_scheduler_kwargs is .*'power': 2.*, but lr_scheduler_type is nul",
        ),
        ((f"{OPTIM}.total_training_steps=9",), "total_training_steps is 9, but lr_scheduler_type is null"),
        (
            (f"{OPTIM}.lr_scheduler_type=constant", f"{OPTIM}.lr_warmup_steps=2"),
            "lr_warmup_steps is 2, but lr_scheduler_type constant has no warm-up: use constant_with_warmup",
        ),
        (("algorithm.old_policy_decay=1",), r"old_policy_decay\s.*less than 1"),
        (("algorithm.sample_source=disk",), r"sample_source\s.*'online' or 'offline'"),
    ],
)
def test_misuse_is_refused_with_the_config(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.name=diffusion_nft", "actor_rollout_ref.rollout.algo.noise_level=0"),
        ("algorithm.name=distill_kl", "actor_rollout_ref.rollout.n=1", f"{ACTOR}.teacher_path=t"),
        ("algorithm.name=dpo", "algorithm.sample_source=offline", "actor_rollout_ref.rollout.n=1"),
        ("algorithm.name=dpo", "algorithm.sample_source=offline", "actor_rollout_ref.rollout.micro_batch_size=3"),
        ("algorithm.name=awm", "algorithm.num_train_timesteps=5", "algorithm.timestep_fraction=0.5"),
    ],
)
def test_what_an_algorithm_does_not_use_is_not_refused(settings: tuple[str, ...]) -> None:
    """No log-probs need no noise, and where samples are not compared a group may be one sample."""
    assert changed(*settings).algorithm.name == settings[0].split("=")[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("actor_rollout_ref.actor.diffusion_loss.loss_mode=guard",),
            "known: awm, dance_grpo, diffusion_nft, distill_fm_mse, distill_kl, dpo, flow_dppo, flow_grpo, ",
        ),
        (("algorithm.adv_estimator=grop",), "known: dance_grpo, flow_grpo, gdpo, mix_grpo"),
        (("actor_rollout_ref.rollout.algo.sde_type=ode",), r"algo.sde_type is 'ode'; known: cps, dance_sde, sde"),
        (
            ("actor_rollout_ref.rollout.algo.sde_options.power=2",),
            r"sde_options has power, but kernel 'sde' takes no",
        ),
        (("algorithm.adv_options.power=2",), r"adv_options has power, but advantage 'flow_grpo' takes epsilon$"),
        (
            (f"{ACTOR}.diffusion_loss.options.alpha=2",),
            r"diffusion_loss.options has alpha, but loss 'flow_grpo' takes no options",
        ),
        (("actor_rollout_ref.model.external_lib=no_such",), r"external_lib names 'no_such', which cannot be imported"),
        (
            ("actor_rollout_ref.actor.diffusion_loss.loss_mode=tests.models.algorithms.test_losses:PairLoss",),
            "needs velocity, partner; an update gives log_probs",
        ),
        (
            (
                "actor_rollout_ref.actor.diffusion_loss.loss_mode=tests.models.algorithms.test_losses:ReferenceLoss",
                "actor_rollout_ref.actor.use_kl_loss=true",
                "actor_rollout_ref.actor.kl_loss_coef=0.1",
                "algorithm.rollout_correction={bypass_mode: false, rollout_is: step}",
            ),
            "would ignore algorithm.rollout_correction.rollout_is",
        ),
        (
            (
                "algorithm.name=grpo_guard",
                "actor_rollout_ref.rollout.algo={sde_type: cps, noise_level: 0.8}",
            ),
            "loss grpo_guard centres .*sde_type cps leave the variance out, .*: use sde or dance_sde, or loss flow",
        ),
        (
            (
                "algorithm.name=flow_dppo",
                "actor_rollout_ref.rollout.algo={sde_type: cps, sde_window_range: [0, 10]}",
            ),
            "ends at the last of 10 steps, .* cps, and loss flow_dppo divides by it: let it end at 9",
        ),
        (
            (
                "algorithm.name=distill_kl",
                f"{ACTOR}.teacher_path=t",
                "actor_rollout_ref.rollout.algo={sde_type: cps, sde_window_range: [0, 10]}",
            ),
            "and loss distill_kl divides by it: let it end at 9",
        ),
        (("algorithm.name=distill_fm_mse",), "'distill_fm_mse' needs a teacher: set actor.teacher_path"),
        (
            ("algorithm.name=awm", f"{ACTOR}.teacher_path=t"),
            "'awm' has no use for a teacher: leave out actor.teacher_pa",
        ),
        (
            ("algorithm.name=diffusion_nft", "algorithm.trainer_type=policy_gradient"),
            "trainer_type is policy_gradient, but loss 'diffusion_nft' needs direct_preference: set it, or give the al",
        ),
        (
            ("algorithm.trainer_type=direct_preference",),
            "trainer_type is direct_preference, but loss 'flow_grpo' needs policy_gradient",
        ),
        (
            ("algorithm.name=dpo", "algorithm.paired_preference=false"),
            "paired_preference is False, but loss 'dpo' needs True",
        ),
        (
            ("algorithm.name=awm", "algorithm.paired_preference=true"),
            "paired_preference is True, but loss 'awm' needs False",
        ),
        (
            (f"{ACTOR}.diffusion_loss.loss_mode=dpo", "algorithm.sample_source=online"),
            "trainer_type is policy_gradient, but loss 'dpo' needs direct_preference",
        ),
    ],
)
def test_misuse_is_refused_before_a_model_is_looked_for(settings: tuple[str, ...], message: str) -> None:
    config = changed(*settings)
    with pytest.raises((ValueError, ConfigError), match=message):
        check_inputs(config)
