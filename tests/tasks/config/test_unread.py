# SPDX-License-Identifier: Apache-2.0
"""Settings that nothing reads are told on the driver, and are no dimension of a sweep; a run goes on with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from models.algorithms import get_diffusion_loss_fn
from models.algorithms.losses import DATA, MODEL_OUTPUTS, TEACHER_DATA
from models.config.actor import LOSSES, DiffusionActorConfig, DiffusionLossConfig
from tasks.config.errors import ConfigError
from tasks.config.presets import PRESETS
from tasks.config.recipes import load_recipe, parse_changes
from tasks.config.sweep import SweepConfig, check_fields
from tasks.config.tree import TrainConfig
from tasks.config.unread import KEEP_OLD_POLICY, READ_BY_LOSSES, RULES, told, without_effect
from tests.tasks.config.test_run_identity import leaves

ROOT = Path(__file__).parents[3]
ALGO, ACTOR = "actor_rollout_ref.rollout.algo", "actor_rollout_ref.actor"
NFT, LORA = "algorithm.name=diffusion_nft", "actor_rollout_ref.model.lora_rank=8"
ROLLOUT, OFFLINE = "actor_rollout_ref.rollout", "algorithm={name: dpo, sample_source: offline}"
KL = f"{ACTOR}.use_kl_loss=true"


def changed(*settings: str) -> TrainConfig:
    return TrainConfig().with_changes(parse_changes(list(settings)))


@pytest.mark.parametrize(
    ("setting", "other", "why"),
    [
        (f"{ALGO}.noise_level=0.9", NFT, "loss diffusion_nft trains on finished samples, which the ODE makes"),
        (f"{ALGO}.sde_window_size=2", "algorithm.name=dpo", "loss dpo trains on finished samples"),
        ("algorithm.num_train_timesteps=4", "algorithm.name=flow_grpo", "loss flow_grpo trains on the sampler's own"),
        (f"{ACTOR}.matching_loss_coef=0.5", LORA, "loss flow_grpo trains on the sampler's own"),
        ("algorithm.old_policy_decay=0.5", "algorithm.name=distill_fm_mse", "loss distill_fm_mse keeps no old policy"),
        (f"{ACTOR}.diffusion_loss.clip_ratio=0.1", NFT, "loss diffusion_nft does not read it"),
        (f"{ACTOR}.diffusion_loss.nft_beta=0.5", "algorithm.name=awm", "loss awm does not read it"),
        (f"{ACTOR}.kl_loss_coef=0.04", "trainer.seed=1", "actor.use_kl_loss is false"),
        (f"{ACTOR}.ema.decay=0.5", "trainer.seed=1", "actor.ema.enable is false"),
        ("actor_rollout_ref.model.target_modules=[to_q]", "trainer.seed=1", "model.lora_rank 0 trains all weights"),
        (f"{ALGO}.iters_per_group=5", "trainer.seed=1", "sde_window_mode is random"),
        ("actor_rollout_ref.rollout.vllm_omni.step_execution=true", LORA, "rollout.name is another engine"),
        ("algorithm.rollout_correction.bypass_mode=false", "algorithm.name=distill_kl", "no old log-probs"),
        ("algorithm.global_std=false", "algorithm.name=distill_kl", "loss distill_kl does not learn from rewards"),
        ("algorithm.adv_mode=binary", OFFLINE, "offline has no advantages"),
        ("data.pairs=mine", "algorithm.name=dpo", "algorithm.sample_source is online"),
        ("data.text_encoder.negative_prompt=blurred", LORA, "data.embeddings is not live"),
        ("trainer.test_freq=2", OFFLINE, "no rollout that could validate"),
        (f"{ACTOR}.guidance_gradient=conditional", LORA, "rollout.pipeline asks for no guidance"),
        (f"{ROLLOUT}.enable_sleep_mode=false", LORA, "rollout.placement is separate, where no worker takes turns"),
        (f"{ROLLOUT}.enable_sleep_mode=auto", LORA, "rollout.placement is separate, where no worker takes turns"),
        (f"{ROLLOUT}.update_weights_bucket_megabytes=64", LORA, "rollout.weight_transport is object_store, which"),
        ("trainer.max_nonfinite_steps=9", LORA, "trainer.on_nonfinite is stop"),
        ("trainer.max_logprob_difference=0.2", NFT, "finished samples, which have no log-probs"),
        *(
            (setting, OFFLINE, "algorithm.sample_source offline samples nothing")
            for setting in (
                f"{ROLLOUT}.n=8",
                f"{ROLLOUT}.enable_sleep_mode=false",
                f"{ROLLOUT}.weight_transport=collective",
                f"{ROLLOUT}.update_weights_bucket_megabytes=64",
                "trainer.canary_tolerance=0.1",
                "trainer.canary_missing_share=0.5",
                "trainer.canary_timesteps=2",
                "trainer.canary_batch=8",
                "trainer.keep_stages=false",
                "tracking.pictures=8",
                "tracking.keep_pictures=3",
                "tracking.keep_validation_grids=3",
                "reward.guards.window=9",
            )
        ),
        *(
            (setting, OFFLINE, "offline starts neither rollout nor rewards, which flows.validate does")
            for setting in (
                f"{ROLLOUT}.name=vllm_omni",
                f"{ROLLOUT}.micro_batch_size=8",
                f"{ROLLOUT}.num_actors=2",
                f"{ROLLOUT}.num_gpus_per_actor=0.5",
                f"{ROLLOUT}.num_threads=2",
                f"{ROLLOUT}.placement=colocated",
                f"{ROLLOUT}.max_queued_batches=4",
                f"{ROLLOUT}.max_restarts=0",
                f"{ROLLOUT}.pipeline.solver=dpm2",
                f"{ROLLOUT}.val_kwargs.n=2",
                f"{ROLLOUT}.val_kwargs.pipeline.num_inference_steps=40",
                "reward.max_missing_fraction=0.5",
                "reward.functions.ocr.weight=2",
            )
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_told(setting: str, other: str, why: str) -> None:
    path = setting.partition("=")[0]
    said = told(changed(other, setting)) or ""
    assert said.startswith(f"without effect in this run: {path} ")
    assert why in said
    assert list(without_effect(changed(other, setting))) == [path]


LIVE = ["data.embeddings=live", f"{ROLLOUT}.pipeline.max_sequence_length=24"]
CUDA, TOGETHER = "trainer.device=cuda", f"{ROLLOUT}.placement=colocated"
ENCODER = "data.text_encoder"


@pytest.mark.parametrize(
    ("others", "setting", "why"),
    [
        (LIVE, f"{ENCODER}.num_gpus=0.5", "data.text_encoder.device is cpu"),
        (LIVE, f"{ENCODER}.enable_sleep_mode=false", "data.text_encoder.device is cpu"),
        (
            [*LIVE, CUDA, f"{ENCODER}={{device: cuda, placement: colocated}}"],
            f"{ENCODER}.num_gpus=0.5",
            "data.text_encoder.placement is colocated, which takes no GPU besides",
        ),
        (
            [CUDA, TOGETHER],
            f"{ROLLOUT}.num_gpus_per_actor=0.5",
            "rollout.placement is colocated, where a worker takes what its rank's GPU leaves",
        ),
        ([], f"{ROLLOUT}.num_gpus_per_actor=0.5", "trainer.device is cpu"),
        ([TOGETHER], f"{ROLLOUT}.num_gpus_per_actor=0.5", "trainer.device is cpu"),
    ],
)
def test_a_share_of_a_gpu_that_nobody_takes_is_told(others: list[str], setting: str, why: str) -> None:
    path, _, value = setting.partition("=")
    assert told(changed(*others)) is None
    assert told(changed(*others, setting)) == f"without effect in this run: {path} {value.capitalize()} ({why})"


@pytest.mark.parametrize(
    "settings",
    [
        [f"{ALGO}.noise_level=0.9", f"{ACTOR}.diffusion_loss.clip_ratio=0.1"],
        [NFT, "algorithm.num_train_timesteps=4", "algorithm.old_policy_decay=0.5"],
        [NFT, f"{ALGO}.noise_level=0"],  # which is how its samples are made
        [NFT, f"{ACTOR}.use_kl_loss=false"],  # the coefficient is the name's own
        [KL, f"{ACTOR}.kl_loss_coef=0.04"],
        [LORA, "actor_rollout_ref.model.target_modules=[to_q]"],
        [f"{ACTOR}.guidance_gradient=conditional", f"{ROLLOUT}.pipeline.true_cfg_scale=4"],
        [f"{ACTOR}.guidance_gradient=conditional", f"{ROLLOUT}.pipeline.guidance_scale=0.5"],  # guides Z-Image
        [f"{ROLLOUT}.placement=colocated", f"{ROLLOUT}.enable_sleep_mode=false"],
        [f"{ROLLOUT}.weight_transport=collective", f"{ROLLOUT}.update_weights_bucket_megabytes=64"],
        [f"{ACTOR}.diffusion_loss={{loss_mode: 'my.package:Loss', dpo_beta: 3}}"],
        ["data={name: mine, pairs: elsewhere}"],
        [f"{ROLLOUT}.n=8", f"{ROLLOUT}.val_kwargs.n=2", "trainer.canary_batch=8", "reward.functions.ocr.weight=2"],
        [CUDA, f"{ROLLOUT}.num_gpus_per_actor=0.5"],
        [*LIVE, f"{ENCODER}={{device: cuda, num_gpus: 0.5, enable_sleep_mode: false}}"],
        [*LIVE, CUDA, f"{ENCODER}={{device: cuda, placement: colocated, enable_sleep_mode: false}}"],
        [OFFLINE, f"{ROLLOUT}.pipeline={{height: 24, num_inference_steps: 8}}", f"{ROLLOUT}.val_kwargs.max_prompts=4"],
    ],
)
def test_what_is_read_or_true_anyhow_is_not_told(settings: list[str]) -> None:
    assert told(changed(*settings)) is None


def test_an_offline_run_has_no_rollout_worker_to_trace() -> None:
    traced = ["trainer.profile.iterations=[1]", "trainer.profile.rollout_workers=[]"]
    assert without_effect(changed(OFFLINE, *traced)).keys() == {"trainer.profile.rollout_workers"}
    assert told(changed(*traced)) is None


def test_a_reward_of_ones_own_is_told_as_one_setting() -> None:
    """Not field by field; nor is the model that rewards ask."""
    mine = "reward.functions={brightness: {weight: 2}, 'my.module:score': {}, red: {reward: 'my.module:red'}}"
    model = "reward.reward_model={model_path: judges/small}"
    assert told(changed(OFFLINE, mine, model)) == (
        "without effect in this run: reward.functions.brightness, reward.functions.my.module:score, "
        "reward.functions.red my.module:red, reward.reward_model judges/small (algorithm.sample_source offline starts "
        "neither rollout nor rewards, which flows.validate does)"
    )
    assert told(changed(mine, model)) is None


def test_a_recorded_config_tells_no_more_than_its_recipe() -> None:
    """It has every field written out."""
    for name in PRESETS:
        config = changed(f"algorithm.name={name}")
        assert told(config) is None
        assert told(TrainConfig.model_validate(config.model_dump(mode="json"))) is None


def test_the_recipes_hold_nothing_that_their_algorithm_does_not_read() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    recipes = [entry["name"] for entry in deployments if entry["entrypoint"] == "flows/train.py:train"]
    for name in recipes:
        found = without_effect(load_recipe(name, ROOT / "prefect.yaml"))
        of_validation = {path for path, why in found.items() if why.endswith("which flows.validate does")}
        assert found.keys() == of_validation, name  # an offline recipe says how its weights are measured
        assert name == "dpo-offline" or not found, name


def test_the_rules_name_fields() -> None:
    paths = {path for path, _, _ in leaves(TrainConfig())}
    for rule in RULES:
        for named in rule.fields:
            assert any(path == named or path.startswith(f"{named}.") for path in paths), named


class Watched:
    """A section that remembers which of its fields were asked for."""

    def __init__(self, section: Any, read: set[str]):
        self._section, self._read = section, read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._section, name)


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_read_what_is_said_of_them(name: str) -> None:
    loss, read = get_diffusion_loss_fn(name), set[str]()
    generator = torch.Generator().manual_seed(0)

    def tensors(keys: tuple[str, ...]) -> dict[str, Any]:
        """Two samples of two numbers each; what is one number of a sample has that of its latents' first."""
        latents = {key: torch.rand(2, 2, generator=generator) + 0.1 for key in keys}
        one = {"log_probs", "old_log_probs", "advantages", "sigmas", "sqrt_dt"}
        return {key: value[:, 0] if key in one else value for key, value in latents.items()}

    output = tensors(MODEL_OUTPUTS[loss.process]) | {"std_dev_t": torch.ones(2, 1)}
    actor = Watched(DiffusionActorConfig(), set())
    actor.diffusion_loss = Watched(DiffusionLossConfig(), read)
    data = tensors((*DATA[loss.process], TEACHER_DATA[loss.process]))
    loss(config=actor, model_output={key: output[key] for key in loss.required_model_output_keys}, data=data)  # type: ignore[arg-type]
    assert read == {field for field, readers in READ_BY_LOSSES.items() if name in readers}
    assert loss.keeps_old_policy() == (name in KEEP_OLD_POLICY)
    assert loss.learns_from_rewards() == (not name.startswith("distill"))


def test_a_sweep_does_not_search_what_nothing_reads() -> None:
    space: dict[str, Any] = {f"{ALGO}.noise_level": {"low": 0.3, "high": 1.0}}
    check_fields(TrainConfig(), SweepConfig(space=space))
    with pytest.raises(ConfigError, match="noise_level would change nothing, for loss diffusion_nft trains on"):
        check_fields(changed(NFT), SweepConfig(space=space))
    # Where one of the searched names reads it, the search is one.
    check_fields(changed(NFT), SweepConfig(space=space | {"algorithm.name": {"choices": ["awm", "flow_grpo"]}}))
