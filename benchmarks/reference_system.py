# SPDX-License-Identifier: Apache-2.0
"""VeRL-Omni beside the train flow: one set of overrides, one model, the same prompts and reward, one device.

    python -m benchmarks.reference_system --model FOLDER --checkout VERL_OMNI --python "COMMAND" [--prompts 16] [--n 8]
        [--size 384] [--micro-batch 8] [--iterations 6] [--set F=V ...] [--reference-set O ...] [--log FILE] [--tiny]

Flow-GRPO with LoRA on a Stable Diffusion 3 model in diffusers format, which is drawn where it is not there. The
overrides are those of VeRL-Omni's own script (`examples/flowgrpo_trainer/sd35`), but for the reward: its rule for
JPEG's compressibility, so that no third program takes part. VeRL-Omni runs in its checkout, by `--python`: the command
that starts a Python in which it and its vLLM-Omni are installed (`env PYTHONPATH=... python`). Then `flows.migrate`
makes a recipe of the same overrides, and the train flow runs it, with the changes of `--set`. Both log their stages'
seconds by the same names; a line of JSON an iteration in --log, and a table of medians over the iterations after the
second, validation left out. On a GPU the train flow compiles its blocks (`model.compile`), as the recipes for GPUs do;
VeRL-Omni compiles its rollout's by default, and has no such field for its trainer.

VeRL-Omni encodes the prompts' texts in every rollout; here a stage does it once, before the run, and is not counted.
"""

import argparse
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import pandas as pd

from benchmarks.failures import refuse_failed
from benchmarks.followed_runs import (
    COMPILING,
    STEP,
    TIMES,
    VALIDATED,
    Job,
    Line,
    append_line,
    folder_of,
    follow,
    metrics_of,
    read_lines,
)
from benchmarks.lanes import end_session
from benchmarks.local_services import ending_at_sigterm
from tasks.data.prompts import COLUMNS, prompt_uid

STAGES = ("step", "gen", "reward", "old_log_prob", "update_actor", "update_weights")
"""Names in `timing_s/`, the same in both."""
THEIRS, OURS = "VeRL-Omni", "Doubleflow"
CHAT = "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endfor %}"
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
SEQUENCE = 256
"""Tokens of T5."""
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
LINE = re.compile(r"step:(\d+) - (.*)")
VALUE = re.compile(r"([\w/.]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)")


def overrides(given: argparse.Namespace, folder: Path) -> list[str]:
    """Those of VeRL-Omni's script for Stable Diffusion 3.5, of the sizes that are asked for."""
    micro = given.micro_batch
    tokenizers = f"{{clip: {{path: tokenizer, max_length: 77}}, t5: {{path: tokenizer_3, max_length: {SEQUENCE}}}}}"
    reward = "reward.reward_functions.jpeg"
    return [
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'test.parquet'}",
        f"data.train_batch_size={given.prompts}",
        "data.max_prompt_length=512",
        "data.seed=42",
        f"{MODEL}.algorithm=flow_grpo",
        f"{MODEL}.path={given.model.resolve()}",
        f'{MODEL}.custom_chat_template="{CHAT}"',
        f"{MODEL}.extra_tokenizers={tokenizers}",
        f"{MODEL}.attn_backend=native",
        f"{MODEL}.lora_rank=32",
        f"{MODEL}.lora_alpha=64",
        f"{MODEL}.target_modules={json.dumps(TARGETS).replace(chr(34), chr(39))}",
        f"{MODEL}.enable_gradient_checkpointing={not given.no_checkpointing}",
        f"{ACTOR}.diffusion_loss.clip_ratio=1e-5",
        f"{ACTOR}.optim.lr=1e-4",
        f"{ACTOR}.optim.weight_decay=0.0001",
        f"{ACTOR}.ppo_mini_batch_size={given.prompts // 2}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro}",
        f"{ACTOR}.use_kl_loss=False",
        f"{ACTOR}.kl_loss_coef=0.0",
        f"{ACTOR}.fsdp_config.param_offload=False",
        f"{ACTOR}.fsdp_config.optimizer_offload=False",
        f"{ACTOR}.fsdp_config.model_dtype=bfloat16",
        f"{ACTOR}.strategy=fsdp2",
        f"{ROLLOUT}.name=vllm_omni",
        f"{ROLLOUT}.rollout_attn_backend=TORCH_SDPA",
        f"{ROLLOUT}.n={given.n}",
        f"{ROLLOUT}.seed=42",
        f"{ROLLOUT}.agent.num_workers=1",
        f"{ROLLOUT}.load_format=safetensors",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={micro}",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.pipeline.height={given.size}",
        f"{ROLLOUT}.pipeline.width={given.size}",
        f"{ROLLOUT}.pipeline.num_inference_steps=10",
        f"{ROLLOUT}.pipeline.guidance_scale=1.0",
        f"{ROLLOUT}.pipeline.max_sequence_length={SEQUENCE}",
        f"{ROLLOUT}.max_prompt_embed_length={SEQUENCE + 77}",
        f"{ROLLOUT}.algo.noise_level=0.8",
        f"{ROLLOUT}.algo.sde_type=cps",
        f"{ROLLOUT}.algo.sde_window_size=3",
        f"{ROLLOUT}.algo.sde_window_range=[0,5]",
        f"++{ROLLOUT}.engine_kwargs.vllm_omni.max_num_seqs=256",
        f"++{ROLLOUT}.engine_kwargs.vllm_omni.request_batch_max_wait_ms=10",
        f"{ROLLOUT}.val_kwargs.algo.noise_level=0.0",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={micro}",
        "reward.num_workers=2",
        "reward.custom_reward_function.path=pkg://verl_omni.reward_loop.reward_manager.multi",
        "reward.custom_reward_function.name=_multi_reward_placeholder",
        "reward.reward_manager.name=MultiVisualRewardManager",
        "reward.reward_manager.module.path=pkg://verl_omni.reward_loop.reward_manager",
        f"+{reward}.path=pkg://verl_omni.utils.reward_score.jpeg_compressibility",
        f"+{reward}.name=compute_score",
        f"+{reward}.weight=1.0",
        "reward.aggregation=weighted_sum",
        'trainer.logger=["console"]',
        "trainer.log_val_generations=0",
        "trainer.val_before_train=False",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={given.iterations}",
        f"trainer.total_epochs={given.iterations}",
    ]


def named(program: str, given: argparse.Namespace) -> str:
    """What a run is called."""
    return f"{program}, {given.variant}" if given.variant else program


def begin(name: str, given: argparse.Namespace) -> None:
    """A run's line of the iteration before its first: with the pictures that each has; lines of an earlier run end."""
    append_line(given.log, {"run": name, "seed": 0, "iteration": 0, "images": given.prompts * given.n})


def write_prompts(folder: Path, count: int) -> None:
    """Each program's own table of the same prompts; `count` of them are trained on."""
    texts = [f"A road sign that says {number}" for number in range(1000, 1000 + count + 4)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    theirs = pd.DataFrame({"prompt": chats, "data_source": "jpeg_compressibility"})
    theirs["reward_model"] = [{"style": "rule", "ground_truth": ""}] * len(texts)
    theirs["extra_info"] = [{"index": at, "raw_prompt": text} for at, text in enumerate(texts)]
    theirs.iloc[:count].to_parquet(folder / "train.parquet")
    theirs.iloc[count:].to_parquet(folder / "test.parquet")
    splits = ["train"] * count + ["test"] * 4
    rows = [(prompt_uid(text), text, split, None, "{}", "") for text, split in zip(texts, splits, strict=True)]
    pd.DataFrame(rows, columns=COLUMNS).to_parquet(folder / "prompts.parquet")


def draw_model(given: argparse.Namespace, folder: Path) -> None:
    """Stable Diffusion 3.5 medium with random weights, or a tiny one, where the folder is not there."""
    if (given.model / "model_index.json").is_file():
        return
    command = [sys.executable, "-m", "benchmarks.drawn_checkpoint", "sd3.5-medium", str(given.model)]
    command += ["--device", given.device, "--prompts", str(folder / "prompts.parquet")]
    subprocess.run([*command, *(["--tiny"] if given.tiny else [])], check=True)


def train_theirs(given: argparse.Namespace, folder: Path) -> list[str]:
    """VeRL-Omni's run, in its checkout; what failed."""
    log, name = folder / "verl_omni.log", named(THEIRS, given)
    begin(name, given)
    command = [*shlex.split(given.python), "-m", "verl_omni.trainer.main_diffusion"]
    command += [*overrides(given, folder), *given.reference_set]
    began = time.time()
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=given.checkout, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(given.limit)
        except subprocess.TimeoutExpired:  # what it printed is kept
            code = -signal.SIGKILL
        finally:
            end_session(process)  # whatever it has left would keep memory and cores from the other run
    for line in iterations_in(log.read_text(errors="replace").splitlines()):
        append_line(given.log, {"run": name, "seed": 0, **line})
    end = {"end": f"exit code {code}", "wall_s": time.time() - began}
    append_line(given.log, {"run": name, "seed": 0, **end})
    return [f"{THEIRS} failed with exit code {code}, see {log}"] if code else []


def iterations_in(log: Sequence[str]) -> Iterator[Line]:
    """{"iteration": i, stage: seconds} of what its console logger prints."""
    for text in log:
        if found := LINE.search(text):
            values = {name: float(value) for name, value in VALUE.findall(found[2])}
            if STEP not in values:
                continue
            yield {"iteration": int(found[1])} | {stage: values.get(TIMES + stage, 0.0) for stage in STAGES}


def recipe(given: argparse.Namespace, folder: Path) -> Path:
    """The same overrides as a recipe."""
    script, file = folder / "overrides.sh", folder / "recipe.yaml"
    command = ["python3", "-m", "verl_omni.trainer.main_diffusion", *overrides(given, folder)]
    script.write_text(shlex.join(command) + "\n")
    subprocess.run(
        [sys.executable, "-m", "flows.migrate", str(script), "--out", str(file)], check=True, stdout=subprocess.PIPE
    )
    return file


def changes(given: argparse.Namespace, folder: Path) -> list[str]:
    """What no override says: where the data are, the device and the engine there; and what the caller changes."""
    return [
        f"data.prompts={folder / 'prompts.parquet'}",
        f"data.embeddings={folder / 'embeddings'}",
        f"trainer.device={given.device}",
        f"{ROLLOUT}.name={given.engine}",
        f"{MODEL}.compile={str(given.device == 'cuda').lower()}",
        *given.set,
    ]


def encode_prompts(given: argparse.Namespace, folder: Path) -> None:
    """Ours, once: of these prompts by this model."""
    shutil.rmtree(folder / "embeddings", ignore_errors=True)
    command = [sys.executable, "-m", "flows.prepare", "embeddings", "--model", str(given.model)]
    command += ["--prompts", str(folder / "prompts.parquet"), "--out", str(folder / "embeddings")]
    command += ["--max-sequence-length", str(SEQUENCE), "--device", given.device]
    subprocess.run([*command, "--set", "batch_size=16"], check=True)


def train_ours(given: argparse.Namespace, folder: Path) -> list[str]:
    """The train flow's run; what failed."""
    encode_prompts(given, folder)
    name = named(OURS, given)
    begin(name, given)
    job = Job(name, 0, str(recipe(given, folder)), changes(given, folder), folder_of(folder, name, 0))
    runs = folder / "followed.jsonl"
    runs.unlink(missing_ok=True)
    failed = follow([job], runs, limit_each=given.limit)
    metrics = metrics_of(job)
    for iteration in sorted(metrics.get(STEP, {})):
        seconds = {stage: metrics.get(TIMES + stage, {}).get(iteration, 0.0) for stage in STAGES}
        seconds["step"] -= metrics.get(VALIDATED, {}).get(iteration, 0.0)
        append_line(given.log, {"run": name, "seed": 0, "iteration": int(iteration), **seconds})
    end = [line["end"] for line in read_lines([runs]) if "end" in line]
    append_line(given.log, {"run": name, "seed": 0, "end": end[-1] if end else "not begun"})
    return failed


def table(lines: Sequence[Line]) -> str:
    """A row a run: medians of its iterations after the second, beside VeRL-Omni's of the same variant where it ran."""
    runs, images = dict[str, list[Line]](), {line["run"]: line["images"] for line in lines if "images" in line}
    for line in lines:
        if line.get("iteration", 0) > COMPILING:
            runs.setdefault(line["run"], []).append(line)
    rows = [f"| Run | Iterations | {' | '.join(STAGES)} | Pictures a second | of {THEIRS}'s |"]
    rows.append(f"|{'---|' * (len(STAGES) + 4)}")
    speeds = {run: images[run] / median(line["step"] for line in of) for run, of in runs.items()}
    for run, of in runs.items():
        seconds = " | ".join(f"{median(line[stage] for line in of):.2f}" for stage in STAGES)
        theirs = speeds.get(run.replace(OURS, THEIRS))
        times = f"{speeds[run] / theirs:.2f}" if theirs else ""
        rows.append(f"| {run} | {len(of)} | {seconds} | {speeds[run]:.2f} | {times} |")
    return "\n".join(rows)


@ending_at_sigterm()
def main() -> None:
    """Train both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Stable Diffusion 3 in diffusers format")
    parser.add_argument("--tiny", action="store_true", help="draw a tiny one")
    parser.add_argument("--checkout", type=Path, help="of VeRL-Omni; without it the train flow runs alone")
    parser.add_argument("--python", default="python", help="command of a Python that has VeRL-Omni")
    parser.add_argument("--prompts", type=int, default=16, help="of an iteration, in two optimiser steps")
    parser.add_argument("--n", type=int, default=8, help="pictures of a prompt")
    parser.add_argument("--size", type=int, default=384, help="pixels of a side")
    parser.add_argument("--micro-batch", type=int, default=8, help="pictures of a pass of the update")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of the train flow")
    parser.add_argument("--engine", choices=["diffusers", "vllm_omni"], default="diffusers", help="of the train flow")
    parser.add_argument("--variant", help="what is said of both runs in the log and the table")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep the activations, in both")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="changed in the train flow")
    parser.add_argument("--reference-set", nargs="+", default=[], metavar="OVERRIDE", help="more for VeRL-Omni")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a run")
    parser.add_argument("--log", type=Path, default=Path("runs/reference_system/results.jsonl"))
    given = parser.parse_args()
    if given.prompts < 2 or given.prompts % 2:
        parser.error(f"--prompts is {given.prompts}: two optimiser steps need an even number")
    if not shlex.split(given.python):
        parser.error("--python is empty: name the command of a Python that has VeRL-Omni")
    folder = given.log.parent.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder, given.prompts * given.iterations)
    draw_model(given, folder)
    failed = train_theirs(given, folder) if given.checkout else []
    failed += train_ours(given, folder)
    print(table(read_lines([given.log])))
    refuse_failed(failed)


if __name__ == "__main__":
    main()
