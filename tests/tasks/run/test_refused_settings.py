# SPDX-License-Identifier: Apache-2.0
"""Settings that the driver refuses before Prefect, Ray or MLflow are touched: a recipe, overrides, and the checks."""

import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
import yaml
from prefect.logging import disable_run_logger

from models.schedulers.noise_keys import NoiseKey
from tasks.actors.ray_address import ClusterError
from tasks.actors.ray_files import RayFilesError
from tasks.actors.rollout_group import window_of_batch
from tasks.cli.terminal import WRONG_INPUT, last_words
from tasks.config.errors import ConfigError
from tasks.config.recipes import load_recipe, parse_changes
from tasks.data.base_weights import MEMORY
from tasks.data.embeddings import write_embeddings
from tasks.data.prompts import build_prompt_table, load_prompts
from tasks.records.run_store import CHECKPOINTS, CheckpointStore, RunState
from tasks.run.opening import open_run
from tasks.run.preflight import check_inputs
from tasks.run.schedule import windows_of
from tasks.run.start_times import StartTimes
from tests.support.helpers import TEXT_DIM
from tests.support.platform_helpers import RECIPE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A user's folder: the recipe `tiny`, a model without its weights, eight train prompts and their embeddings."""
    folder = tmp_path_factory.mktemp("refused")
    data = folder / "data"
    shutil.copytree(tiny_model, data / "base_model", ignore=shutil.ignore_patterns("*.safetensors"))
    (data / "numbers.txt").write_text("".join(f"the number {number}\n" for number in range(472, 484)))
    table = build_prompt_table([str(data / "numbers.txt")], n_test=4, n_train=8, seed=0, target_pattern=None)
    table.to_parquet(data / "prompts.parquet")

    def encode(texts: list[str]) -> dict[str, torch.Tensor]:
        mask = torch.ones(len(texts), 3, dtype=torch.bool)
        return {"prompt_embeds": torch.ones(len(texts), 3, TEXT_DIM), "prompt_embeds_mask": mask}

    write_embeddings(
        load_prompts(data / "prompts.parquet"),
        encode,
        data / "embeddings",
        16,
        batch_size=4,
        negative_prompt="",
        max_sequence_length=24,
        model="",
        model_digest="",
    )
    deployment = {"name": "tiny", "entrypoint": "flows/train.py:train", "parameters": {"config": RECIPE}}
    (folder / "prefect.yaml").write_text(yaml.safe_dump({"name": "doubleflow", "deployments": [deployment]}))
    return folder


@pytest.mark.parametrize("begun", ["checkpoints/iter_000001/state.json", "run.json"])
def test_a_run_that_is_not_to_resume_is_refused_for_what_was_given(
    begun: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the command would advise to go on by itself, and be refused again."""
    monkeypatch.chdir(folder)
    recipe = load_recipe("tiny")
    settings = ["trainer.resume_mode=disable", f"trainer.default_local_dir={tmp_path}"]
    config = recipe.with_changes(parse_changes(settings, recipe=recipe))
    inputs = check_inputs(config)
    (config.run_dir / begun).parent.mkdir(parents=True)
    (config.run_dir / begun).touch()
    with (
        pytest.raises(ConfigError, match=r"record or checkpoints and trainer.resume_mode is disable: use") as refused,
        open_run(config, inputs, recipe, StartTimes()),
    ):
        pass
    assert last_words(refused.value)[1] == WRONG_INPUT


def test_gpus_that_are_not_there_are_missed_before_ray_starts_or_a_folder_is_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray took its start to find out, and a folder of empty ones stayed."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    recipe = load_recipe("tiny")
    (reward,) = recipe.reward.functions
    settings = ["trainer.device=cuda", f"reward.functions.{reward}.num_gpus=64", "trainer.gpu_memory_gib=80"]
    settings.append(f"trainer.default_local_dir={tmp_path}/runs")
    config = recipe.with_changes(parse_changes(settings, recipe=recipe))
    there = torch.cuda.device_count()
    message = rf"needs 6\d GPUs .* but the Ray cluster that is started here would have {there}: lower them"
    with pytest.raises(ClusterError, match=message), open_run(config, check_inputs(config), recipe, StartTimes()):
        pass
    assert not (tmp_path / "runs").exists()


def test_no_checkpoint_is_read_while_ray_starts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be beside it, in a thread: Ray would wait for cores."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "else one is written into the home folder")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # too long for a socket's name
    recipe = load_recipe("tiny")
    settings = [f"trainer.default_local_dir={tmp_path}", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    config = recipe.with_changes(parse_changes(settings, recipe=recipe))
    inputs = check_inputs(config)
    state = RunState(1, config.digest(), inputs.digest, "run")
    CheckpointStore(config.run_dir / CHECKPOINTS).save(state, lambda folder: (folder / "file").touch())
    before = set(threading.enumerate())
    with (
        disable_run_logger(),
        pytest.raises(RayFilesError, match="would be too long"),
        open_run(config, inputs, recipe, StartTimes()),
    ):
        pass
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.name == "behind"] == []


def test_the_recipe_itself_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert len(check_inputs(load_recipe("tiny")).train) == 8


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor_rollout_ref.rollout.n=1", "rollout.n is 1"),
        ("actor_rollout_ref.rollout.algo.noise_level=0", "noise_level is 0"),
        ("actor_rollout_ref.rollout.pipeline.solver=dpm2", "solver is dpm2, but loss flow_grpo explores"),
        ("actor_rollout_ref.rollout.algo.sde_window_range=[0, 4]", "sde_window_range"),
        ("actor_rollout_ref.rollout.algo.sde_window_range=[2, 9]", "must lie within the 4 denoising steps"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "must be a multiple of actor.ppo_mini_batch_size"),
        ("trainer.n_gpus_per_node=5", "5 trainer ranks"),
        ("data.train_batch_size=100", "has only 8 train prompts"),
        (
            "actor_rollout_ref.actor.fsdp_config.param_dtype=bfloat16",
            "param_dtype is bfloat16, but the rollout computes in actor_rollout_ref.model.dtype float32",
        ),
        (
            "reward.functions={'tests.tasks.actors.test_reward_worker:FrameCount': {frame_interval: 2}}",
            "frame_interval is 2, but tests.tasks.actors.test_reward_worker:FrameCount wants video",
        ),
        ("algorithm.adv_estimator=grop", "known: dance_grpo, flow_grpo"),
        ("actor_rollout_ref.actor.diffusion_loss.loss_mode=grop", "known: awm, dance_grpo, diffusion_nft"),
        (
            "actor_rollout_ref.actor.optim={lr_scheduler_type: cosine, lr_scheduler_kwargs: {min_lr: 0}}",
            "lr_scheduler_kwargs has min_lr, but cosine takes num_cycles",
        ),
        (
            "actor_rollout_ref.actor.optim={lr_scheduler_type: cosine, lr_warmup_steps: 9}",
            "more than the 6 optimiser steps that it spans",
        ),
        (
            "actor_rollout_ref.actor.optim={lr_scheduler_type: cosine, total_training_steps: 5}",
            "total_training_steps has cosine span 5 optimiser steps, but the run makes 6",
        ),
        (
            "actor_rollout_ref.actor.ema.enable=true",
            "actor.ema.update_interval is 8, but the run makes 6 optimiser steps",
        ),
        ("algorithm.name=grop", "known: flow_grpo, dance_grpo"),
        ("reward.functions={ocrr: {}}", "no reward 'ocrr'"),
        ("actor_rollout_ref.model.path=nowhere", "nowhere/model_index.json does not exist"),
        ("actor_rollout_ref.model.initial_weights=nowhere", "which holds neither pytorch_lora_weights.safetensors nor"),
        ("actor_rollout_ref.rollout.pipeline.height=18", "must be multiples of 4"),
        ("trainer.total_training_stepz=3", "total_training_stepz"),
    ],
)
def test_a_bad_setting_is_refused_on_the_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str, message: str
) -> None:
    """Through the same functions as the flow, before Ray or MLflow are touched."""
    monkeypatch.chdir(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message.replace("[", r"\[")):
        check_inputs(load_recipe("tiny").with_changes(parse_changes([setting])))
    digests = MEMORY.parts[0]  # remembered where the model is some seconds old already, as on a busy machine
    assert {path.name for path in folder.iterdir()} - {digests} == {"data", "prefect.yaml"}


FORWARD = ["algorithm.name=diffusion_nft", "algorithm.num_train_timesteps=2"]
LOSS = "actor_rollout_ref.actor.diffusion_loss"
RECTIFIED = f"{LOSS}.temporal_gradient_rectification=true"
PER_PROMPT = [
    "actor_rollout_ref.rollout.algo.sde_window_per=prompt",
    "actor_rollout_ref.rollout.algo.sde_window_size=1",
]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["algorithm.best_worst_k=2"],
            "the 2 best and 2 worst of rollout.n 4 samples are all there are: take at most 1",
        ),
        (["algorithm.name=dpo", "algorithm.best_worst_k=1"], "best_worst_k is 1, but a loss that compares pairs"),
        (["algorithm.name=dpo", "algorithm.adv_mode=one_only"], "adv_mode is one_only, but a loss that compares pairs"),
        (
            ["algorithm.name=dpo", "algorithm.share_noise_in_group=true"],
            "share_noise_in_group is True, but a loss that",
        ),
        (["algorithm.share_noise_in_group=true"], "trainer_type policy_gradient trains on the sampler's own steps"),
        (
            ["algorithm.timestep_sampling=stratified", "algorithm.num_train_timesteps=2"],
            "timestep_sampling stratified, but trainer_type policy_gradient",
        ),
        ([*FORWARD, f"{LOSS}.awm_weighting=adaptive"], "loss diffusion_nft weighs its errors so by itself"),
        ([*FORWARD, RECTIFIED], "loss diffusion_nft multiplies no step by a weight: use flow_grpo"),
        (["algorithm.name=grpo_guard", RECTIFIED], "loss grpo_guard scales its steps by itself"),
        (
            ["actor_rollout_ref.rollout.algo={sde_type: cps, noise_level: 0.8, sde_window_range: [0, 4]}", RECTIFIED],
            "the last of 4 steps has none with cps",
        ),
        (
            [*PER_PROMPT, "actor_rollout_ref.rollout.micro_batch_size=8"],
            "micro_batch_size 8 does not divide rollout.n 4, so batches would hold samples of several prompts",
        ),
    ],
)
def test_a_setting_that_cannot_work_with_the_algorithm_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_inputs(load_recipe("tiny").with_changes(parse_changes(settings)))


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.best_worst_k=1"],
        ["actor_rollout_ref.actor.ema={enable: true, update_interval: 6}"],
        [*FORWARD, "algorithm.share_noise_in_group=true", "algorithm.timestep_sampling=stratified"],
        [*FORWARD, "algorithm.name=awm", f"{LOSS}.awm_weighting=adaptive", "algorithm.best_worst_k=1"],
        [*PER_PROMPT, RECTIFIED],
    ],
)
def test_settings_that_work_together_are_taken_and_name_another_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    monkeypatch.chdir(folder)
    config = load_recipe("tiny").with_changes(parse_changes(settings))
    check_inputs(config)
    assert config.digest() != load_recipe("tiny").digest()


def test_each_prompt_of_an_iteration_has_its_own_window(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its batches have it; without the setting all have the iteration's."""
    monkeypatch.chdir(folder)
    uids = [f"p{number}" for number in range(30)]
    recipe = load_recipe("tiny")
    own = windows_of(recipe.with_changes(parse_changes(PER_PROMPT)), 3, uids)
    assert {tuple(window) for window in own.values()} == {(0,), (1,)}
    seeded = windows_of(recipe.with_changes(parse_changes([*PER_PROMPT, "trainer.seed=1"])), 3, uids)
    later = windows_of(recipe.with_changes(parse_changes(PER_PROMPT)), 2, uids)
    assert own != seeded != later != own, "each seed and each iteration draws its own"
    shared = windows_of(recipe.with_changes(parse_changes(PER_PROMPT[1:])), 3, uids)
    assert len({tuple(window) for window in shared.values()}) == 1
    assert windows_of(recipe.with_changes(parse_changes(FORWARD)), 3, uids) == {}
    one, again, two = (NoiseKey(0, 3, uid, index) for uid, index in (("p0", 0), ("p0", 1), ("p1", 0)))
    assert window_of_batch([one, again], own) == tuple(own["p0"])
    assert window_of_batch([one, two], {}) == ()
    assert window_of_batch([one, two], (0, 1)) == (0, 1)
    with pytest.raises(ValueError, match="one batch holds prompts with different windows"):
        window_of_batch([one, two], {"p0": [0], "p1": [1]})


def test_a_setting_that_nothing_reads_is_told_where_the_run_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(folder)
    settings = [*FORWARD, "actor_rollout_ref.rollout.algo.noise_level=0.9"]
    config = load_recipe("tiny").with_changes(parse_changes(settings))
    check_inputs(config, trains=False)
    assert "without effect" not in caplog.text
    check_inputs(config)
    assert (
        "without effect in this run: actor_rollout_ref.rollout.algo.noise_level 0.9 (loss diffusion_nft" in caplog.text
    )


def test_a_schedule_that_ends_before_the_run_is_told_where_the_run_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(folder)
    optim = "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1}, total_training_steps: 5}"
    config = load_recipe("tiny").with_changes(parse_changes([f"actor_rollout_ref.actor.optim={optim}"]))
    check_inputs(config, trains=False)
    assert "after the span" not in caplog.text
    check_inputs(config)
    assert "but the run makes 6: those after the span keep its last learning rate" in caplog.text


MOVING = "actor_rollout_ref.rollout.algo={sde_window_size: 1, sde_window_mode: "
STOPPING = "reward.guards={action: stop, validations: "


@pytest.mark.parametrize(
    ("within", "beyond", "said"),
    [
        (
            ["actor_rollout_ref.actor.optim.lr_warmup_steps=6"],
            ["actor_rollout_ref.actor.optim.lr_warmup_steps=7"],
            "actor.optim.lr_warmup_steps is 7, but the run makes 6 optimiser steps: the learning rate ends below "
            "actor.optim.lr",
        ),
        (
            ["trainer.profile.iterations=[2, 3]"],
            ["trainer.profile.iterations=[2, 4, 9]"],
            "trainer.profile.iterations names 4, 9, but the run ends with iteration 3: they have no traces",
        ),
        *(
            (
                taken,
                [f"{MOVING}{mode}, iters_per_group: 3}}"],
                f"rollout.algo.sde_window_mode is {mode} and iters_per_group 3, but the run ends with iteration 3: the "
                "window never moves",
            )
            for mode, taken in (
                ("progressive", [f"{MOVING}progressive, iters_per_group: 2}}"]),
                ("decay", [f"{MOVING}decay, iters_per_group: 2}}"]),
                ("progressive", [*FORWARD, f"{MOVING}progressive, iters_per_group: 3}}"]),  # has no window
            )
        ),
        (
            [*FORWARD, "algorithm.old_policy_update_interval=3"],
            [*FORWARD, "algorithm.old_policy_update_interval=4"],
            "algorithm.old_policy_update_interval is 4, but the run ends with iteration 3: the old policy of loss "
            "diffusion_nft, which samples, never moves",
        ),
        *(
            (
                [*also, f"{STOPPING}{there - 1}}}"],
                [*also, f"{STOPPING}{there}}}"],
                f"reward.guards.action is stop, but the run ends with iteration 3 and has {there} of the {there + 1} "
                "validations that a flag needs: lower trainer.test_freq or reward.guards.validations, or let the run "
                "be longer",
            )
            for there, also in (
                (3, []),
                (4, ["trainer.test_freq=1"]),
                (3, ["trainer.test_freq=1", "trainer.val_before_train=false"]),
                (2, ["trainer.test_freq=100"]),
            )
        ),
    ],
)
def test_what_lies_beyond_the_runs_end_is_told(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    within: list[str],
    beyond: list[str],
    said: str,
) -> None:
    """And not refused: the run may be made longer later."""
    monkeypatch.chdir(folder)
    for settings in (within, beyond):
        assert "but the run" not in caplog.text
        check_inputs(load_recipe("tiny").with_changes(parse_changes(settings)))
    assert said in caplog.text
