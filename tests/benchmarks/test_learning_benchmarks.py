# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of learning: every run that they would make is a config, and their tables are of what logs say."""

import json
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from benchmarks import fewer_images, nft_drift, real_recipes, time_to_reward, words, words_algorithms, words_iteration
from benchmarks.followed_runs import append_line, curves_of, is_done, read_lines
from benchmarks.local_services import ROOT
from benchmarks.public_training import PUBLISHED, Readers, advantages, counted, settings_of
from benchmarks.run_state import Outcome
from models.algorithms import compute_flow_grpo_outcome_advantage
from tasks.config.presets import PRESETS
from tasks.config.recipes import load_recipe, parse_changes
from tasks.config.tree import TrainConfig
from tasks.data.prompts import Prompt
from tests.support.patience import PATIENCE

GIVEN = Namespace(iterations=40, test_freq=5, readers=5, set=[])


def test_every_algorithm_is_a_run_with_lora_and_its_own_parts(tmp_path: Path) -> None:
    assert words_algorithms.SETTINGS.keys() == PRESETS.keys()
    (tmp_path / f"{words_algorithms.TEACHER}-0" / "train-x" / "weights").mkdir(parents=True)
    for name in words_algorithms.ALL:
        job = words_algorithms.job(name, 1, Namespace(**vars(GIVEN), folder=tmp_path))
        config = load_recipe(job.recipe).with_changes(parse_changes(list(job.changes)))
        model, loss = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.diffusion_loss
        assert (model.dtype, model.lora_rank) == ("bfloat16", 32), name
        assert config.algorithm.name == name.partition(",")[0]
        expected = PRESETS[config.algorithm.name].get("actor_rollout_ref.actor.diffusion_loss.loss_mode", "flow_grpo")
        assert loss.loss_mode == expected
        assert list(config.reward.functions) == ["ocr", "ink_and_paper"]
        steps = config.actor_rollout_ref.rollout.algo.sde_window_size
        if config.algorithm.trainer_type == "policy_gradient":
            assert steps == {"mix_grpo": 2, "flow_grpo, one step a group": 1}.get(name, 4), name


def test_what_is_said_to_need_fewer_pictures_is_a_run_beside_the_one_without_it(tmp_path: Path) -> None:
    def is_on(name: str) -> dict[str, bool]:
        job = fewer_images.job(name, 1, 16, tmp_path)
        config = load_recipe(job.recipe).with_changes(parse_changes(list(job.changes)))
        policy, algorithm = config.actor_rollout_ref, config.algorithm
        assert algorithm.name == name.partition(",")[0]
        return {
            "noise shared": algorithm.share_noise_in_group,
            "levels stratified": algorithm.timestep_sampling == "stratified",
            "matching .05": policy.actor.matching_loss_coef == 0.05,
            "matching .25": policy.actor.matching_loss_coef == 0.25,
            "best and worst 4": algorithm.best_worst_k == 4,
            "adaptive": policy.actor.diffusion_loss.awm_weighting == "adaptive",
            "same start": policy.rollout.algo.init_same_noise,
            "one step a prompt": policy.rollout.algo.sde_window_per == "prompt"
            and policy.actor.diffusion_loss.temporal_gradient_rectification,
        }

    for name in fewer_images.SETTINGS:
        _, *settings = name.replace("both", "noise shared, levels stratified").split(", ")
        assert {setting for setting, on in is_on(name).items() if on} == set(settings), name
    assert {name.partition(",")[0] for name in fewer_images.SETTINGS} <= fewer_images.SETTINGS.keys()


def test_a_run_that_was_stopped_is_in_no_row_of_fewer_pictures(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for name, rewards in {"awm": {0: 0.5, 4: 0.6, 8: 0.9}, "awm, both": {0: 0.5, 4: 0.8, 8: 0.9}}.items():
        logged(log, name, rewards)
        append_line(log, {"run": name, "seed": 0, "end": "finished", "wall_s": 200.0})
    logged(log, "flow_grpo", {0: 0.5})
    append_line(log, {"run": "flow_grpo", "seed": 0, "end": "limit", "wall_s": 200.0})
    plain, both = fewer_images.table(fewer_images.finished([log])).splitlines()[2:]
    assert plain == "| `awm` | 0.500 | 0.600 | 0.900 | 4096 | 0.750 |  |  |"
    assert both == "| `awm, both` | 0.500 | 0.800 | 0.900 | 4096 | 0.850 | +0.100 | nan |"


def written(log: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], set[str]]:
    """(rows that `--write` leaves in docs/algorithms.md of the folder where this is, pictures that it draws)."""
    for picture in Path("docs").glob("*.png"):
        picture.write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["fewer_images", "--write", "--log", str(log)])
    fewer_images.main()
    rows = [line for line in Path("docs/algorithms.md").read_text().splitlines() if line.startswith("| `")]
    return rows, {picture.stem for picture in Path("docs").glob("*.png") if picture.stat().st_size}


def test_rows_of_runs_that_no_log_has_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And pictures that show one. What has other columns, or was compared with another run, is an error instead, and
    nothing is written."""
    monkeypatch.chdir(tmp_path)
    page = Path("docs/algorithms.md")
    page.parent.mkdir()
    page.write_text("<!-- benchmarks/fewer_images.py -->\n<!-- end -->\nThe rest.\n")

    def log_of(number: int, runs: dict[str, dict[int, float]]) -> Path:
        log = tmp_path / f"{number}.jsonl"
        for name, rewards in runs.items():
            logged(log, name, rewards)
            append_line(log, {"run": name, "seed": 0, "end": "finished", "wall_s": 200.0})
        return log

    of_all = {name: {0: 0.5, 4: 0.7} for name in ("awm, both", "flow_grpo, best and worst 4", "awm", "flow_grpo")}
    before, drawn = written(log_of(1, of_all), monkeypatch)
    names = ["awm", "awm, both", "flow_grpo", "flow_grpo, best and worst 4"]
    assert [row.split("`")[1] for row in before] == names
    assert drawn == {"fewer_images_awm", "fewer_images_flow_grpo"}
    more = {"awm": {0: 0.5, 4: 0.7}, "awm, both": {0: 0.5, 4: 0.8}, "flow_grpo": {0: 0.5, 4: 0.7}}
    after, drawn = written(log_of(2, more | {"flow_grpo, one step a prompt": {0: 0.5, 4: 0.6}}), monkeypatch)
    new = "| 0.500 | 0.600 | not | 0.600 | -0.100 | nan |"
    assert after == [
        before[0],
        before[1].replace("0.700", "0.800").replace("+0.000", "+0.100"),
        before[2],
        f"| `flow_grpo, one step a prompt` {new}",
        before[3],
    ]
    assert drawn == {"fewer_images_awm"}
    with pytest.raises(ValueError, match=r"other columns than these logs, so the rows of awm, both, flow.* stay"):
        written(log_of(3, {"awm": {0: 0.5, 8: 0.7}}), monkeypatch)
    with pytest.raises(ValueError, match="awm, both was compared with another measurement of awm: give its log, too"):
        written(log_of(4, {"awm": {0: 0.5, 4: 0.6}}), monkeypatch)
    assert [line for line in page.read_text().splitlines() if line.startswith("| `")] == after
    assert page.read_text().endswith(" |\n<!-- end -->\nThe rest.\n")


def test_both_loops_have_the_published_settings() -> None:
    recipe, changes = time_to_reward.OURS["words-flow-grpo, published settings"]
    common = time_to_reward.changes_of(recipe, [], 5)
    changes = [*changes, *common, time_to_reward.halves(recipe, [])]
    config = load_recipe(recipe).with_changes(parse_changes(changes))
    assert settings_of("recipe", config) == replace(PUBLISHED, window=(0, 9, 9))
    assert [name for name, entry in config.reward.functions.items() if entry.guard] == []
    assert config.reward.functions["ocr"] == load_recipe(recipe).reward.functions["ocr"]


def test_the_public_loop_makes_as_many_calls_of_the_reward_as_the_flow() -> None:
    """`batch_size: auto` is a call for each worker; with another rule one of the loops would wait for its last one."""
    config = load_recipe("words-flow-grpo").with_changes(
        {"reward": {"functions": {"brightness": {"num_workers": 3, "batch_size": "auto"}}}}
    )
    readers = Readers(config)
    try:
        pictures = np.zeros((7, 4, 4, 3), np.uint8)
        answers = readers.submit(pictures, [Prompt(f"uid-{i}", "a", None, {}, "") for i in range(7)])
        assert [len(answer.result()) for answer in answers] == [3, 2, 2]
    finally:
        readers.close()


@pytest.mark.parametrize(
    ("run", "other"),
    [
        ("awm", "awm"),
        ("awm, both", "awm"),
        ("awm, both, adaptive", "awm, both"),
        ("diffusion_nft, both, best and worst 4", "diffusion_nft, both"),
        ("diffusion_nft, levels stratified", "diffusion_nft"),
    ],
)
def test_a_setting_is_compared_with_the_run_without_it_alone(run: str, other: str) -> None:
    assert fewer_images.without_last(run) == other


TABLE = pd.DataFrame({"reward": [0.5, 0.25]})
WHOLE = Outcome({"a": np.ones(2)}, {"reward": {1: 0.5}}, [], {1: TABLE, 2: TABLE})


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({"samples": {1: TABLE}}, "{'samples': [2]}"),
        ({"samples": {1: TABLE, 2: TABLE + 1}}, "{'samples': [2]}"),
        ({"weights": {}}, "{'weights': ['a']}"),
        ({"weights": {"a": np.array([1.0, np.nan])}}, "{'weights': ['a']}"),
        ({"weights": {"a": np.ones(3)}}, "{'weights': ['a']}"),
        ({"history": {}}, "{'metrics': ['reward']}"),
        ({"duplicates": ["reward"]}, "steps logged twice: ['reward']"),
        ({}, None),
    ],
)
def test_what_a_run_has_lost_is_a_difference_whoever_has_lost_it(lost: dict[str, Any], said: str | None) -> None:
    other = replace(WHOLE, **lost)
    assert WHOLE.difference(other) == other.difference(WHOLE) == said


def test_every_variant_of_the_words_names_what_it_trains_on(tmp_path: Path) -> None:
    given = Namespace(iterations=50, readers=5, set=[], folder=tmp_path)
    for variant in words.VARIANTS:
        job = words.job(variant, 1, given)
        recipe = load_recipe(job.recipe)
        config = recipe.with_changes(parse_changes([*job.changes], recipe=recipe))
        rewards = config.reward.functions
        trained = [label for label, entry in rewards.items() if not entry.guard]
        others = {"words, hackable": ["jpeg_compressibility"]}
        assert trained == others.get(variant, ["ocr", "ink_and_paper"] if "colours" in variant else ["ocr"])
        assert (rewards["ocr"].num_workers, config.trainer.total_training_steps) == (5, 50)


def test_an_iteration_without_rewards_has_no_more_samples_than_the_recipe_learns_from() -> None:
    """Also with the smallest model, as the benchmark on a CPU and the tests of CUDA graphs have it."""
    config = load_recipe("words")
    learnt_from = config.data.train_batch_size * 2 * (config.algorithm.best_worst_k or 0)
    alone = words_iteration.recipe()
    assert alone.data.train_batch_size * alone.actor_rollout_ref.rollout.n == learnt_from == 1024
    small = alone.with_changes(words_iteration.SMALL)
    assert (small.actor_rollout_ref.rollout.n, small.algorithm.best_worst_k) == (4, None)


def test_the_words_table_has_what_is_read_and_not_the_reward(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for iteration, (reward, read) in {0: (1.5, 0.5), 1: (1.7, 0.8), 2: (1.8, 0.91), 3: (1.9, 0.88)}.items():
        line = {"run": "words", "seed": 0, "iteration": iteration, "images": 100 * iteration, "held_out": reward}
        append_line(log, line | {"read": read, "colours": 0.97, "training_s": 60.0 + 5 * iteration, "sharing": 2})
    row = words.table(curves_of(read_lines([log]))).splitlines()[2]
    assert row == "| words | 0 | 0.500 | 0.880 | 0.910 | 0.97 | 3 | 1.2 | 1.2 | 2 | 5.0 | 20 |"


def test_rows_of_variants_without_a_log_stay_in_the_words_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with them the plot, whose curves no log has; columns of another kind cannot stay."""
    page, log = tmp_path / "words.md", tmp_path / "log.jsonl"
    drawn: list[int] = []
    monkeypatch.setattr(words, "plot", lambda curves, path: drawn.append(len(curves)))
    monkeypatch.setattr(sys, "argv", ["words", "--write", "--page", str(page), "--log", str(log)])

    def written(before: list[str]) -> list[str]:
        page.write_text("\n".join(["<!-- benchmarks/words.py -->", *before, "<!-- end -->", ""]))
        words.main()
        return [line.split(" | ")[0] for line in page.read_text().splitlines() if line.startswith("| ")][1:]

    line = {"run": "words", "seed": 0, "iteration": 0, "images": 0, "held_out": 0.5, "read": 0.5}
    append_line(log, line | {"training_s": 0.0, "sharing": 1})
    old = [words.HEADER, "|---|", "| words | of before |", "| words, LoRA | of before |"]
    assert written([]) == ["| words"]
    assert drawn == [1]
    assert written(old) == ["| words, LoRA", "| words"]
    assert "| words, LoRA | of before |\n| words | 0 | 0.500 |" in page.read_text()
    assert drawn == [1]
    with pytest.raises(ValueError, match="has other columns: give the logs of all its rows"):
        written(["| Variant |", *old[1:]])


def test_the_public_loops_advantages_are_ours_but_for_their_deviation() -> None:
    rewards = np.random.default_rng(0).random(24)
    groups = [f"prompt {i % 3}" for i in range(24)]
    for global_std, size in ((True, 24), (False, 8)):
        expected, _ = compute_flow_grpo_outcome_advantage(
            torch.from_numpy(rewards), np.array(groups), global_std=global_std, epsilon=0.0
        )
        found = advantages(rewards, groups, global_std)
        assert found == pytest.approx(expected.numpy() * np.sqrt(size / (size - 1)), rel=2e-3)


def test_rows_without_an_advantage_only_fill_up() -> None:
    scores = np.array([0.0, 1.0, 0.0, -1.0, 0.5, 0.0, 0.0])
    kept = counted(scores, 4, np.random.default_rng(0))
    assert len(kept) == 4
    assert {1, 3, 4} < set(kept)
    assert list(counted(np.ones(4), 4, np.random.default_rng(0))) == [0, 1, 2, 3]


def logged(log: Path, run: str, rewards: dict[int, float], sharing: int = 2) -> None:
    for iteration in range(max(rewards) + 1):
        line = {"run": run, "seed": 0, "iteration": iteration, "images": 512 * iteration, "held_out": None}
        line |= {"training_s": 6.0 * iteration, "wall_s": 60 + 7.0 * iteration, "sharing": sharing}
        append_line(log, line | ({"held_out": rewards[iteration]} if iteration in rewards else {}))


def test_tables_say_when_a_reward_was_reached(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    logged(log, "words", {0: 0.5, 10: 0.65, 20: 0.81})
    logged(log, "public loop, our settings", {0: 0.5, 10: 0.55})
    append_line(log, {"run": "words", "seed": 0, "end": "goal", "wall_s": 200.0})
    append_line(log, {"run": "public loop, our settings", "seed": 0, "end": "limit", "wall_s": 200.0})
    assert is_done("words", 0, log)
    assert not is_done("public loop, our settings", 0, log)
    curves = curves_of(read_lines([log]))
    ours, public = time_to_reward.table(curves).splitlines()[2:]
    assert ours == "| words | 0.500 | 0.810 | 1.0 | 2.0 | 2.0 | 3.3 | 10240 | 6.0 | 85 |"
    assert public.startswith("| public loop, our settings | 0.500 | 0.550 | not in 1.0 | not in 1.0 | not in 1.0 |")
    row = words_algorithms.table(curves).splitlines()[2]
    assert row == "| `words` | 0 | 0.500 | 0.810 | 0.810 | +0.310 | nan | 20 | 10240 | 1.0 | 171 |"
    words_algorithms.plot(curves, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0
    assert json.loads(log.read_text().splitlines()[0])["training_s"] == 0.0


def test_a_run_that_began_anew_has_its_newest_lines(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    logged(log, "awm", {0: 0.5, 5: 0.6, 8: 0.7})
    logged(log, "awm", {0: 0.5, 5: 0.4})
    (curve,) = curves_of(read_lines([log]))["awm"]
    assert [line["held_out"] for line in curve.measured] == [0.5, 0.4]


def test_servers_that_cannot_start_end_a_real_recipe_before_its_checkpoint_is_drawn(tmp_path: Path) -> None:
    machine = real_recipes.Machine(tmp_path, "sd35", time.monotonic() + 300)
    machine.starting = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    drawing = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(7200)"])
    with pytest.raises(RuntimeError, match="servers: exit code 3"):
        machine.wait("checkpoint", drawing)
    assert drawing.wait(PATIENCE) < 0


@pytest.mark.parametrize("machine", real_recipes.MACHINES)
@pytest.mark.parametrize("folder", real_recipes.MODELS)
def test_a_real_recipe_with_few_prompts_is_one_that_a_run_accepts(folder: str, machine: str) -> None:
    """On two GPUs as on one: a rollout micro-batch for each GPU in each of two optimiser steps."""
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    configs = {entry["name"]: entry["parameters"]["config"] for entry in deployments if "gpu" in entry["tags"]}
    of_model = [name for name, config in configs.items() if config["actor_rollout_ref"]["model"]["path"] == folder]
    assert of_model
    recipes = [real_recipes.Recipe(name, configs[name], 2, machine=machine) for name in of_model]
    real_recipes.refuse_what_does_not_go_together(recipes)
    for recipe in recipes:
        changed = TrainConfig.model_validate(recipe.config).with_changes(recipe.overrides)
        assert changed.gpus_needed() == recipe.gpus
        assert changed.data.train_batch_size == 2 * recipe.gpus
    with pytest.raises(SystemExit, match=f"{of_model[0]} on {machine}: .*train_batch_size"):
        real_recipes.refuse_what_does_not_go_together([replace(recipes[0], settings=["data.train_batch_size=0"])])


def test_the_table_of_real_recipes_is_of_the_logs_of_many_machines(tmp_path: Path) -> None:
    """A failure hides no earlier whole line, rows without a line stay, and one that never ended says why."""
    stages = {f"timing_s/{key}": 1.0 for key in real_recipes.STAGES.values()}
    metrics = stages | {"timing_s/step": 10.0, "perf/total_num_images": 32.0, "memory/trainer/gpu_peak_gib": 5.0}
    whole = {"recipe": "wan", "metrics": metrics, "seconds": {"continued": 7.0}, "settings": ["lora_rank=32"]}
    failed = {"recipe": "wan", "failed": "the limit came", "seconds": {}}
    never = {"recipe": "qwen", "failed": "exit code 1\nno | room", "seconds": {}}
    kept = {"`sd35`": "| `sd35` |" + " 1 |" * (real_recipes.HEADER.count("|") - 2), "`wan`": "| `wan` | older |"}
    found = real_recipes.table([whole | {"note": "slow"}, failed, never, whole | {"machine": "two_h200"}], kept)
    page = tmp_path / "recipes.md"
    page.write_text(f"<!-- benchmarks/{real_recipes.SCRIPT} -->\n{found}\n<!-- end -->\n")
    rows = real_recipes.rows_of(page)
    assert list(rows) == ["`sd35`", "`wan`", "`qwen`", "`wan`, two h200"]
    assert rows["`sd35`"] == kept["`sd35`"]
    # 32 pictures in 10 s less the validation's and the checkpoint's.
    assert "| 10.0 | 4.00 | 5.0 and 0.0 | there | there | there | 7 | lora_rank=32, slow |" in rows["`wan`"]
    assert rows["`qwen`"].endswith("| not to its end: exit code 1 no / room |")
    assert {row.count("|") for row in found.splitlines()} == {real_recipes.HEADER.count("|")}
    assert real_recipes.rows_of(ROOT / real_recipes.PAGE).keys() >= {"`sd35-ocr-flow-grpo`", "`diffusion-nft`"}
    assert real_recipes.table([], kept).splitlines()[2:] == [*kept.values()]


def test_the_drifts_runs_repeat_and_a_row_has_the_first_looks_at_the_goals() -> None:
    setting = nft_drift.Setting(old_policy_decay=0.5)
    one, again = (nft_drift.train(nft_drift.Task(0, steps=5), setting, 5, 1.0, seed=3) for _ in range(2))
    assert one == again
    assert [look.iteration for look in one] == [0, 5]
    assert one[0].distance == 0.0 < one[1].distance
    seen = nft_drift.Look
    runs = [[seen(0, 0.3, 0.0, 0.5), seen(5, 0.8, 0.2, 0.6), seen(10, 0.95, 0.4, 1.0)]] * 2
    rows = nft_drift.table({setting: runs, nft_drift.Setting(): [runs[0], runs[0][:2]]}, [0.8, 0.9]).splitlines()
    assert rows[2] == "| `old_policy_decay` 0.5 | 5 | 0.20 | 1.20 | 10 | 0.40 | 2.00 |"
    assert rows[3] == "| `nft_beta` 0.3 | 5 | 0.20 | 1.20 | not reached |  |  |"
