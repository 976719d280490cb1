# SPDX-License-Identifier: Apache-2.0
"""VeRL-Omni beside the train flow: what is read of its log, and that one list of overrides is both programs' run."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.followed_runs import append_line, read_lines
from benchmarks.local_services import ROOT
from benchmarks.reference_system import (
    changes,
    iterations_in,
    overrides,
    recipe,
    table,
    train_theirs,
    write_prompts,
)
from tasks.config.recipes import load_config, parse_changes
from tasks.data.prompts import load_prompts

PRINTED = (
    "\x1b[36m(TaskRunner pid=27282)\x1b[0m step:2 - actor/lr:np.float64(0.0001) - actor/loss:np.float64(-5.2e-07) - "
    "timing_s/agent_loop/slowest/generate_sequences:np.float64(0.19) - timing_s/gen:0.27 - timing_s/reward:1.1e-05 - "
    "timing_s/old_log_prob:1.5 - timing_s/update_actor:2.5 - timing_s/update_weights:1.25 - timing_s/step:8 - "
    "perf/throughput:1.66"
)


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    """The command's arguments, of a run of two iterations."""
    sizes = {"prompts": 4, "n": 2, "size": 64, "micro_batch": 4, "iterations": 2}
    return argparse.Namespace(
        model=tmp_path / "model",
        device="cpu",
        engine="diffusers",
        variant=None,
        no_checkpointing=True,
        set=[],
        reference_set=[],
        **sizes,
    )


def test_its_seconds_are_read_from_what_its_logger_prints() -> None:
    (line,) = iterations_in(["timing_s/step:9 of no step", PRINTED, "step:3 - actor/lr:0.1", "Training Progress: 100%"])
    assert line == {
        "iteration": 2,
        "step": 8.0,
        "gen": 0.27,
        "reward": 1.1e-05,
        "old_log_prob": 1.5,
        "update_actor": 2.5,
        "update_weights": 1.25,
    }


def test_the_table_leaves_out_what_compiles_and_has_the_ratio(tmp_path: Path) -> None:
    stages = dict.fromkeys(("gen", "reward", "old_log_prob", "update_actor", "update_weights"), 1.0)
    seconds = {
        "VeRL-Omni": [90.0, 80.0, 4.0, 8.0, 6.0],
        "Doubleflow": [50.0, 40.0, 2.0],
        "VeRL-Omni, larger": [9.0, 9.0, 4.0],
        "Doubleflow, larger": [9.0, 9.0, 1.0],
    }
    lines = [
        {"run": run, "iteration": at, "step": step, **stages}
        for run in seconds
        for at, step in enumerate(seconds[run], 1)
    ]
    again = [{"run": run, "iteration": 0, "images": 12} for run in seconds]
    made_before = [{"run": "VeRL-Omni", "iteration": 3, "step": 1000.0, **stages}]
    ended = {"run": "VeRL-Omni", "end": "exit code 0"}
    log = tmp_path / "log.jsonl"
    for line in [*made_before, *again, *lines, ended]:
        append_line(log, {"seed": 0, **line})
    theirs, ours, _, larger = table(read_lines([log])).splitlines()[2:]
    assert theirs == "| VeRL-Omni | 3 | 6.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 2.00 | 1.00 |"
    assert ours == "| Doubleflow | 1 | 2.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 6.00 | 3.00 |"
    assert larger == "| Doubleflow, larger | 1 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 12.00 | 4.00 |"
    alone = table([*again, *(line for line in lines if line["run"] != "VeRL-Omni, larger")]).splitlines()[-1]
    assert alone.endswith("| 12.00 |  |"), "nothing is compared with another variant"


def test_the_same_overrides_are_a_recipe_of_the_same_work(given: argparse.Namespace, tmp_path: Path) -> None:
    config = load_config(recipe(given, tmp_path)).with_changes(parse_changes(changes(given, tmp_path)))
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size) == (4, 2, 2)
    assert (rollout.pipeline.height, rollout.pipeline.num_inference_steps, rollout.pipeline.guidance_scale) == (
        64,
        10,
        1.0,
    )
    assert (rollout.algo.sde_type, rollout.algo.sde_window_size, rollout.algo.sde_window_range) == ("cps", 3, (0, 5))
    assert (actor.optim.lr, actor.diffusion_loss.clip_ratio, actor.use_kl_loss) == (1e-4, 1e-5, False)
    assert (config.actor_rollout_ref.model.lora_rank, config.actor_rollout_ref.model.dtype) == (32, "bfloat16")
    assert not actor.fsdp_config.gradient_checkpointing
    assert [entry.reward for entry in config.reward.functions.values()] == ["jpeg_compressibility"]
    assert (config.trainer.total_training_steps, config.trainer.n_gpus_per_node, config.trainer.device) == (2, 1, "cpu")


def test_no_override_is_unknown_to_the_migration(given: argparse.Namespace, tmp_path: Path) -> None:
    recipe(given, tmp_path)
    told = subprocess.run(
        [sys.executable, "-m", "flows.migrate", str(tmp_path / "overrides.sh")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"{len(overrides(given, tmp_path))} overrides" in told
    assert ", 0 unknown" in told


def test_both_have_the_same_prompts(tmp_path: Path) -> None:
    write_prompts(tmp_path, 6)
    chats = [row[0]["content"] for row in pd.read_parquet(tmp_path / "train.parquet")["prompt"]]
    assert chats == [prompt.prompt for prompt in load_prompts(tmp_path / "prompts.parquet", "train")]
    assert len(chats) == len(set(chats)) == 6
    assert (
        len(load_prompts(tmp_path / "prompts.parquet", "test")) == len(pd.read_parquet(tmp_path / "test.parquet")) == 4
    )


def test_what_it_printed_before_its_limit_is_kept(given: argparse.Namespace, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(f"import time\nprint({PRINTED!r}, flush=True)\ntime.sleep(60)\n")
    # `python slow.py -m verl_omni... overrides`: what follows the script's name is its arguments.
    given.python, given.checkout, given.limit, given.log = (
        f"{sys.executable} {slow}",
        tmp_path,
        3.0,
        tmp_path / "log.jsonl",
    )
    (failed,) = train_theirs(given, tmp_path)
    assert failed.startswith("VeRL-Omni failed with exit code -9")
    found = [json.loads(line) for line in given.log.read_text().splitlines()]
    assert [line.get("step", line.get("end", line.get("images"))) for line in found] == [8, 8.0, "exit code -9"]


def test_the_page_has_the_table_of_its_log() -> None:
    lines = read_lines([ROOT / "benchmarks/measured/reference_system_cpu.jsonl"])
    theirs, ours = (row.split(" | ")[2:-2] for row in table(lines).splitlines()[2:])
    page = (ROOT / "benchmarks/RESULTS.md").read_text()
    assert f"| VeRL-Omni | {' | '.join(theirs)} | 3.2 |" in page
    assert f"| Doubleflow, diffusers engine | {' | '.join(ours)} | 16.7 |" in page
