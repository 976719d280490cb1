# SPDX-License-Identifier: Apache-2.0
"""One whole iteration at real size on one GPU, change by change, beside the public Flow-GRPO loop.

    python -m benchmarks.iteration --model sd3.5-medium --public-loop PATH    # a clone of the public code
    python -m benchmarks.iteration --model qwen-image
    python -m benchmarks.iteration --model qwen-image --ranks 4               # on four GPUs, weak scaling
    python -m benchmarks.iteration --model sd3.5-medium --batch 24 --batches 4 --optimizer-steps 2 --work runs/recipe
    python -m benchmarks.iteration --model tiny --device cpu                  # that it runs

An iteration is a rollout with its decoded pictures, the update of one optimiser step, and the weights' way back to the
rollout; with `--batches` and `--optimizer-steps` several of each, as a recipe makes them: from its second step on, what
the rollout recorded is another policy's, and the update computes it. Every variant is a process of its own; its line of
JSON goes to <work>/results.jsonl, and a variant that is there is not run again: a folder is of one model, batch and so
on (`--work`). At the end the lines are a table.
Weights are random: pictures are noise, the work is not.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.failures import refuse_failed
from benchmarks.logs import keep_settings, rows_in
from benchmarks.real_size import use_random_weights, write_model
from models.config.actor import DiffusionActorConfig, DiffusionLossConfig, FSDPConfig
from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import component_config
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest, Trajectories
from models.schedulers.noise_keys import NoiseKey
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.buckets import buckets, pack, unpack
from models.weights.trainable import trainable
from tasks.system.ports import LOOPBACK, free_port


@dataclass(frozen=True)
class Work:
    """What an iteration does: the same for every variant.

    Attributes:
        steps: denoising steps.
        window: trained ones.
        lora: rank and alpha.
        guidance: the field that turns it on, and the scale.
        size: pixels a side.
        text_tokens: of a prompt.
        batch: pictures of an iteration and of the rollout's forward pass.
        micro_batch: pictures of the update's forward and backward pass.
    """

    steps: int
    window: tuple[int, ...]
    lora: tuple[int, int]
    guidance: tuple[str, float]
    size: int
    text_tokens: int
    batch: int
    micro_batch: int


WORK = {
    "tiny": Work(4, (0, 1, 2), (4, 8), ("true_cfg_scale", 4.0), 16, 16, 4, 4),
    "sd3.5-medium": Work(10, tuple(range(9)), (32, 64), ("guidance_scale", 4.5), 512, 205, 32, 32),
    "qwen-image": Work(10, (0, 1), (64, 128), ("true_cfg_scale", 4.0), 512, 128, 16, 4),
}
CONSTANT = {"guidance_gradient": "conditional"}
RECORDED = CONSTANT | {"record": True}
COMPILED = RECORDED | {"compile": True}
WHOLE = COMPILED | {"shard_frozen": False}
ONCE = WHOLE | {"reshard_after_forward": False}
FLOAT8 = ONCE | {"frozen_dtype": "float8"}
FUSED: dict[str, Any] = {"fuse_projections": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "half without prompt constant": CONSTANT,
    "and recorded": RECORDED,
    "and compiled": COMPILED,
    "and frozen weights whole": WHOLE,
    "and gathered once": ONCE,
    "and LoRA's projections fused": ONCE | FUSED,
    "float8 forward": ONCE | {"frozen_dtype": "float8_forward"},
    "float8, projections apart": FLOAT8,
    "float8, LoRA's projections fused": FLOAT8 | FUSED,
}
"""Each changes one thing of the one before it, up to "and gathered once", with which the trainer has the recipes'
settings; the others change those. Float8 computes another function."""
PUBLIC = "public loop"
RESULTS = "results.jsonl"
"""Of all variants, in the folder of the work."""
OF_A_FOLDER = ("model", "device", "batch", "micro_batch", "batches", "optimizer_steps", "checkpointing", "public_batch")
"""Arguments that all lines of a folder share."""
CLIP = 0.2
"""Wide: within 1e-4 rounding would decide which samples have a gradient, and gradients could not be compared."""
CHECKPOINTED = {"gradient_checkpointing": True}


def configs(model: str, folder: Path, chosen: dict[str, Any], kl: float) -> tuple[DiffusionModelConfig, Any]:
    """The model's and the trainer's settings of a variant."""
    work = WORK[model]
    model_config = DiffusionModelConfig.load(
        ModelConfig(
            path=str(folder),
            dtype="float32" if model == "tiny" else "bfloat16",
            lora_rank=work.lora[0],
            lora_alpha=work.lora[1],
            compile=chosen.get("compile", False),
            fuse_projections=chosen.get("fuse_projections", False),
            frozen_dtype=chosen.get("frozen_dtype"),
        ),
        DiffusionPipelineConfig(
            height=work.size, width=work.size, num_inference_steps=work.steps, **{work.guidance[0]: work.guidance[1]}
        ),
        DiffusionRolloutAlgoConfig(sde_type="sde", noise_level=0.7),
    )
    actor = DiffusionActorConfig(
        ppo_micro_batch_size_per_gpu=chosen["micro_batch"],
        use_kl_loss=kl > 0,
        kl_loss_coef=kl,
        guidance_gradient=chosen.get("guidance_gradient", "both"),
        diffusion_loss=DiffusionLossConfig(clip_ratio=CLIP),
        fsdp_config=FSDPConfig(
            shard_frozen=chosen.get("shard_frozen", True),
            reshard_after_forward=chosen.get("reshard_after_forward", True),
            gradient_checkpointing=chosen.get("gradient_checkpointing", False),
        ),
    )
    return model_config, actor


def request_of(
    config: DiffusionModelConfig, text_tokens: int, window: tuple[int, ...], batch: int, record: bool, iteration: int
) -> RolloutRequest:
    """`batch` samples of four prompts, with random embeddings of the model's width and another text to contrast."""
    text = component_config(config.path, "transformer")
    generator = torch.Generator().manual_seed(0)

    def embedded(rows: int, prefix: str = "") -> dict[str, Tensor]:
        tensors = {"prompt_embeds": torch.randn(rows, text_tokens, text["joint_attention_dim"], generator=generator)}
        tensors["prompt_embeds_mask"] = torch.ones(rows, text_tokens, dtype=torch.bool)
        if "pooled_projection_dim" in text:
            tensors["pooled_prompt_embeds"] = torch.randn(rows, text["pooled_projection_dim"], generator=generator)
        return {prefix + name: tensor for name, tensor in tensors.items()}

    keys = tuple(NoiseKey(dist.get_rank(), iteration, f"prompt-{i % 4}", i // 4) for i in range(batch))
    return RolloutRequest(
        keys=keys,
        prompts=PromptTable.of(embedded(4) | embedded(1, "negative_")),
        prompt_index=torch.arange(batch) % 4,
        window=window,
        record_unconditional=record,
    )


def advantages_of(batch: int) -> Tensor:
    """Some of both signs."""
    return torch.randn(batch, generator=torch.Generator().manual_seed(1))


class Clock:
    """Seconds between calls, with the work of every rank's device done: an iteration takes what its slowest does."""

    def __init__(self, device: str):
        self.device, self.last = device, 0.0
        self.lap()

    def lap(self) -> float:
        """Since the call before."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed


@contextmanager
def holding(lock: Path | None, kind: int) -> Iterator[None]:
    """Within the block this process has the lock, alone (LOCK_EX) or with others (LOCK_SH)."""
    if lock is None:
        yield
        return
    with lock.open("w") as stream:
        fcntl.flock(stream, kind)
        yield


class Iterations:
    """Trainer and rollout of one variant, and what they do in an iteration."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.work, self.device = arguments, WORK[arguments.model], arguments.device
        self.sizes = {
            "batch": arguments.batch or self.work.batch,
            "micro_batch": arguments.micro_batch or self.work.micro_batch,
            "batches": arguments.batches,
            "optimizer_steps": arguments.optimizer_steps,
        }
        chosen = VARIANTS[arguments.variant] | self.sizes | (CHECKPOINTED if arguments.checkpointing else {})
        self.batch, self.record = self.sizes["batch"], chosen.get("record", False)
        folder = arguments.work / "model"
        self.model_config, _ = configs(arguments.model, folder, chosen, 0.0)
        self.actors = {kl: configs(arguments.model, folder, chosen, kl)[1] for kl in arguments.kl}
        if arguments.model != "tiny":
            use_random_weights(DiffusionModelBase.get_class(self.model_config), self.device)
        self.trainer = DiffusersFSDPEngine(self.model_config, self.actors[arguments.kl[0]], self.device)
        self.trainer.initialize()
        move_off_zero(self.trainer)
        self.rollout = DiffusersRolloutEngine(self.model_config, self.device)
        sync(self.trainer, self.rollout)
        self.clock, self.made = Clock(self.device), 0

    def request(self) -> RolloutRequest:
        """The next iteration's."""
        self.made += 1
        work = self.work
        return request_of(self.model_config, work.text_tokens, work.window, self.batch, self.record, self.made - 1)

    def mini_batches(self, batches: Sequence[Any]) -> list[ActorBatch]:
        """Of an iteration's batches, for each optimiser step as many."""
        a_step = len(batches) // self.arguments.optimizer_steps
        parts = [(trajectories, advantages_of(self.batch)) for trajectories in batches]
        count = a_step * self.batch * dist.get_world_size()
        return [ActorBatch(parts[first : first + a_step], count) for first in range(0, len(parts), a_step)]

    def one(self, kl: float, keep: bool = False) -> tuple[dict[str, float], dict[str, float]]:
        """(seconds by part, the update's metrics) of an iteration with this weight of the KL."""
        self.trainer.actor_config = self.actors[kl]
        requests, laps = [self.request() for _ in range(self.arguments.batches)], {}
        self.clock.lap()
        recorded = [self.rollout.produce(request).recorded for request in requests]
        laps["rollout_s"] = self.clock.lap()
        if keep:
            assert isinstance(recorded[0], Trajectories)
            _keep(self.arguments, recorded[0], self.trainer)
            self.clock.lap()
        metrics = self.trainer.update_policy(self.mini_batches(recorded))
        laps["update_s"] = self.clock.lap()
        sync(self.trainer, self.rollout)
        laps["sync_s"] = self.clock.lap()
        return laps, metrics

    def decoding_s(self) -> float:
        """Of a batch of pictures, the second time."""
        latents = torch.randn(self.batch, *self.rollout.adapter.latent_shape(self.model_config), device=self.device)
        self.rollout.decode(latents)
        self.clock.lap()
        self.rollout.decode(latents)
        return self.clock.lap()


def measure(arguments: argparse.Namespace) -> None:
    """All numbers of one variant, a line for each weight of the KL."""
    begun = time.perf_counter()
    kept = ("grad_norm", "pg_loss", "logprob_abs_diff/mean", "logprob_abs_diff/max")
    with holding(arguments.lock, fcntl.LOCK_SH):
        iterations = Iterations(arguments)
        first: dict[float, dict[str, Any]] = {}
        for kl in arguments.kl:
            laps, metrics = iterations.one(kl, keep=not first)
            first[kl] = {name: metrics[name] for name in kept} | {"first_s": sum(laps.values())}
            print(f"{arguments.variant}, KL {kl}: first iteration {laps}, {metrics}", flush=True)
        if arguments.lock and arguments.device == "cuda":
            torch.cuda.empty_cache()  # others may need what this process does not while it waits
    with holding(arguments.lock, fcntl.LOCK_EX):
        for kl in arguments.kl:
            if arguments.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = [iterations.one(kl)[0] for _ in range(arguments.repeats + (arguments.lock is not None))]
            best = {name: min(laps[name] for laps in times) for name in times[0]}
            numbers = {"variant": arguments.variant, "kl": kl, "ranks": dist.get_world_size()} | iterations.sizes
            images = iterations.batch * arguments.batches * dist.get_world_size()
            numbers |= first[kl] | best | {"images/s": images / sum(best.values())}
            numbers["of it decoding_s"] = iterations.decoding_s()
            if arguments.device == "cuda":
                numbers["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
            numbers["process_s"] = time.perf_counter() - begun
            if dist.get_rank() == 0:
                _append(arguments.work, numbers)
                print(json.dumps(numbers), flush=True)
        if arguments.trace:
            iterations.trainer.actor_config = iterations.actors[arguments.kl[0]]
            _trace(arguments, iterations)


def sync(trainer: DiffusersFSDPEngine, rollout: DiffusersRolloutEngine) -> None:
    """Give each rank's rollout the trainer's weights as `rollout.weight_transport: ipc` does, which the recipes have on
    one host: gathered and packed on the device, and copied from there. The digests and the canary are the flow's."""
    load = rollout.begin_load()
    for bucket in buckets(trainer.whole_weights()):
        load.take(unpack(*pack(bucket)))
    load.finish()


def move_off_zero(trainer: DiffusersFSDPEngine) -> None:
    """LoRA's B matrices start at 0, where A has no gradient: a trained model is the honest case."""
    for parameter in trainable(trainer.module).values():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        generator = torch.Generator(local.device).manual_seed(3)
        with torch.no_grad():
            local.add_(torch.randn(local.shape, generator=generator, device=local.device), alpha=0.01)


def _keep(arguments: argparse.Namespace, trajectories: Trajectories, trainer: DiffusersFSDPEngine) -> None:
    """For the public loop to replay: the first variant's samples and its LoRA weights."""
    file, weights = arguments.work / "first.pt", trainer.gather_weights()
    if weights and not file.exists():
        torch.save({"trajectories": trajectories, "weights": weights}, file)


def _trace(arguments: argparse.Namespace, iterations: Iterations) -> None:
    """Print where the device's time goes, rollout and update apart."""
    from torch.profiler import ProfilerActivity, profile

    recorded: Any = None
    on_gpu = arguments.device == "cuda"
    for name in ("rollout", "update"):
        requests = [iterations.request() for _ in range(arguments.batches)]
        iterations.clock.lap()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            if name == "rollout":
                recorded = [iterations.rollout.produce(request).recorded for request in requests]
            else:
                iterations.trainer.update_policy(iterations.mini_batches(recorded))
            seconds = iterations.clock.lap()
        text = kernel_table(profiler.events() or [], seconds, on_gpu)
        print(f"--- {name}, {arguments.variant}\n{text}", flush=True)
        (arguments.work / f"trace_{name}_{arguments.variant.replace(' ', '_')}.txt").write_text(text)


KINDS = {
    "compiled between them": ("triton", "cpp_fused"),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas", "splitk", "_scaled_mm", "aten::mm", "aten::addmm"),
    "attention": ("fmha", "flash", "sdpa", "attention"),
    "copies": ("memcpy", "memset", "aten::copy_"),
}
"""By parts of a kernel's name; the first that fits. A compiled one is named after all that it does, a product's
rounding to float8 too. cuDNN's attention is asked for before its other kernels."""


def kernel_table(events: Sequence[Any], seconds: float, on_gpu: bool, rows: int = 25) -> str:
    """Kernels by their time in all, kinds of kernels, and the share of the time in which none ran."""
    kernels = [
        e
        for e in events
        if not on_gpu or (e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False))
    ]
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    kinds: dict[str, float] = defaultdict(float)
    busy, end = 0.0, float("-inf")
    for event in sorted(kernels, key=lambda e: e.time_range.start):
        took = (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e6
        totals[event.name][0] += took
        totals[event.name][1] += 1
        kinds[kind_of(event.name)] += took
        busy += max(event.time_range.end - max(event.time_range.start, end), 0.0) / 1e6
        end = max(end, event.time_range.end)
    lines = [f"{seconds:.3f} s, of them {busy:.3f} with a kernel, {100 * (1 - busy / seconds):.1f} % gaps"]
    lines += [f"  {kind}: {took:.3f} s" for kind, took in sorted(kinds.items(), key=lambda item: -item[1])]
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:rows]
    return "\n".join([*lines, *(f"{took:9.4f} s {count:7d} x  {name[:150]}" for name, (took, count) in longest)]) + "\n"


def kind_of(kernel: str) -> str:
    """Which of `KINDS` a kernel is."""
    name = kernel.lower()
    if "sdpa" in name or "fmha" in name:
        return "attention"
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "others")


# ---- the whole


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown, one row a variant, with images/s over the public loop's at the same KL."""
    public = {line["kl"]: line["images/s"] for line in lines if line["variant"] == PUBLIC}
    for line in lines:
        if line["kl"] in public and line.get("ranks", 1) == 1:  # the public loop is measured on one GPU
            line["x public"] = line["images/s"] / public[line["kl"]]
    columns = list(dict.fromkeys(key for line in lines for key in line))
    rows = [columns, ["---"] * len(columns), *([_text(line.get(column)) for column in columns] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    arguments = _arguments()
    if arguments.variant:
        on_gpu = arguments.device == "cuda"
        settings: dict[str, Any] = {"device_id": torch.device("cuda:0")} if on_gpu else {}
        dist.init_process_group("nccl" if on_gpu else "gloo", **settings)
        measure(arguments)
        dist.destroy_process_group()
        return
    keep_settings(arguments, OF_A_FOLDER)
    write_model(arguments.model, arguments.work / "model")
    done = {(line["variant"], line["kl"], line.get("ranks", 1)) for line in rows_in(arguments.work / RESULTS)}
    failed = []
    for variant in arguments.variants:
        if not all((variant, kl, arguments.ranks) in done for kl in arguments.kl):
            print(f"running {variant} on {arguments.ranks}", flush=True)
            if code := _run_ranks(arguments.ranks, variant):
                failed.append(f"{variant} failed with exit code {code}, see above")
    for kl in arguments.kl if arguments.public_loop else ():
        if (PUBLIC, kl, 1) not in done:
            from benchmarks.public_loop import run

            _append(arguments.work, run(arguments.public_loop, arguments.work, arguments.public_batch, kl))
    print(table(rows_in(arguments.work / RESULTS)))
    refuse_failed(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORK, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--work", type=Path, help="of one setting; runs/benchmark_iteration/MODEL if left out")
    parser.add_argument("--batch", type=int, help="pictures; the model's own number if left out")
    parser.add_argument("--micro-batch", type=int, help="of the update; the model's own number if left out")
    parser.add_argument("--batches", type=int, default=1, help="of the rollout in an iteration")
    parser.add_argument("--optimizer-steps", type=int, default=1, help="in an iteration, of as many batches each")
    parser.add_argument(
        "--ranks", type=int, default=1, help="GPUs, each with its own rollout and a rank of the trainer"
    )
    parser.add_argument("--kl", type=float, nargs="+", default=[0.0], help="weights of the KL to the reference")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--public-loop", type=Path, help="a clone of github.com/yifan123/flow_grpo to run beside")
    parser.add_argument("--public-batch", type=int, default=8)
    parser.add_argument(
        "--lock", type=Path, help="a file: calls that share it prepare and compile side by side, and take times alone"
    )
    parser.add_argument("--trace", action="store_true", help="print the kernels that take longest")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.work = arguments.work or Path("runs/benchmark_iteration", arguments.model)
    if min(arguments.batches, arguments.optimizer_steps) < 1 or arguments.batches % arguments.optimizer_steps:
        parser.error(
            f"--optimizer-steps {arguments.optimizer_steps} of --batches {arguments.batches}: each step takes as many "
            "batches, at least one"
        )
    return arguments


def _run_ranks(ranks: int, variant: str) -> int:
    """One process a rank, each with one GPU in sight, as Ray starts them; the exit code of the first that failed, which
    ends the others, or 0."""
    shared = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = seen.split(",") if seen else [str(rank) for rank in range(ranks)]
    command = [sys.executable, "-m", "benchmarks.iteration", *sys.argv[1:], "--variant", variant]
    running = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": gpus[rank]})
        for rank in range(ranks)
    ]
    try:
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(0.2)
        return next(filter(None, codes), 0)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _append(work: Path, numbers: dict[str, Any]) -> None:
    with (work / RESULTS).open("a") as stream:
        stream.write(json.dumps(numbers) + "\n")


if __name__ == "__main__":
    main()
