# SPDX-License-Identifier: Apache-2.0
"""Where an iteration of the recipe `words` goes on one GPU, with CUDA graphs in the rollout and without.

    python -m benchmarks.words_iteration                  # one GPU, 250 million random weights
    python -m benchmarks.words_iteration --device cpu     # that it runs: the smallest words model, no CUDA graphs

One process holds the trainer and two rollouts, one of each kind, and lets them take turns with the same requests. An
iteration is that of the recipe without its actors and rewards: batches sampled and decoded, the update, the sync with
digests and canary. Samples, log-probs and canary of both rollouts must be equal to the bit, before an update and after;
the first difference ends the program. Printed at the end: a table, and a profile of rollout and update. Nothing is
downloaded and no base model is needed: time does not depend on what the weights are.
"""

import argparse
import inspect
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.words import ALL_SAMPLES
from models.config.algo import DiffusionRolloutAlgoConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest, Trajectories
from models.schedulers.noise_keys import NoiseKey
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.buckets import BUCKET_BYTES, buckets
from models.weights.canary import Canary, check_canary
from models.weights.digests import DigestBook, check_digests, digests_of
from models.words_stable_diffusion_3.build import build_pipeline
from models.words_stable_diffusion_3.settings import WordsSettings, smallest
from tasks.config.recipes import changed_recipe
from tasks.config.tree import TrainConfig

SMALL = {
    "data": {"train_batch_size": 4},
    "actor_rollout_ref": {
        "model": {"compile": False},
        "rollout": {"n": 4, "micro_batch_size": 4, "pipeline": {"height": 32, "width": 96}},
        "actor": {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 4},
    },
}
NOISY = DiffusionRolloutAlgoConfig(sde_type="sde", noise_level=0.7)
"""For log-probs, which the recipe's own sampling has none of."""
WINDOW = (1, 2)
PLAIN, GRAPHS = "plain", "CUDA graphs"


def recipe() -> TrainConfig:
    """The recipe `words` with no more samples than it learns from: without rewards nobody can choose among them."""
    return changed_recipe("words", ALL_SAMPLES)


class Bench:
    """The recipe's engines with random weights.

    Args:
        config: the recipe, with `model.path` where the model is.
        device: cpu or cuda.
    """

    def __init__(self, config: TrainConfig, device: str):
        policy = config.actor_rollout_ref
        self.config, self.device, self.settings = config, device, policy.rollout
        self.model_config = DiffusionModelConfig.load(policy.model, policy.rollout.pipeline, policy.rollout.algo)
        self.adapter = DiffusionModelBase.get_class(self.model_config)
        actor = policy.actor.model_copy(update={"optim": policy.actor.optim.spanning(1000)})
        self.trainer = DiffusersFSDPEngine(self.model_config, actor, device, config.algorithm)
        self.trainer.initialize()
        kinds = {PLAIN: False} | ({GRAPHS: True} if device == "cuda" and knows_graphs() else {})
        self.rollouts = {name: new_rollout(self.model_config, device, graphs) for name, graphs in kinds.items()}
        shapes = self.adapter.text_shapes(self.model_config, policy.rollout.pipeline.max_sequence_length)
        generator = torch.Generator().manual_seed(0)
        self.text = {
            name: torch.randn(config.data.train_batch_size, *shape, generator=generator)
            for name, shape in shapes.items()
        }

    def prompts(self, first: int, count: int) -> PromptTable:
        """So many, with random embeddings."""
        rows = {name: tensor[first : first + count] for name, tensor in self.text.items()}
        return PromptTable.of(rows | {"prompt_embeds_mask": torch.ones(rows["prompt_embeds"].shape[:2]).bool()})

    def requests(self, iteration: int) -> list[RolloutRequest]:
        """An iteration's batches."""
        n, each = self.settings.n, self.settings.batch_size // self.settings.n
        return [
            RolloutRequest(
                keys=tuple(NoiseKey(0, iteration, f"prompt-{first + i}", j) for i in range(each) for j in range(n)),
                prompts=self.prompts(first, each),
                prompt_index=torch.arange(each).repeat_interleave(n),
                window=(),
                record_finished=True,
            )
            for first in range(0, self.config.data.train_batch_size, each)
        ]

    def sample(self, name: str, iteration: int) -> list[Any]:
        """What a rollout makes of an iteration's requests."""
        return [self.rollouts[name].produce(request) for request in self.requests(iteration)]

    def update(self, made: list[Any]) -> dict[str, float]:
        """The iteration's optimiser steps, one for each batch of requests."""
        size = self.settings.batch_size
        rows = torch.randn(len(made), size, generator=torch.Generator().manual_seed(1))
        return self.trainer.update_policy(
            [ActorBatch([(one.recorded, row)], size) for one, row in zip(made, rows, strict=True)]
        )

    def sync(self) -> None:
        """Give every rollout the trainer's weights, and prove it as a run does: digests, and a canary of equal bits."""
        book, loads = DigestBook(self.model_config.dtype), [one.begin_load() for one in self.rollouts.values()]
        for bucket in buckets(book.passing(self.trainer.whole_weights()), BUCKET_BYTES):
            for load in loads:
                load.take(bucket)
        canary = Canary(self.prompts(0, 4), rows=self.settings.batch_size)
        velocity, sent = self.trainer.canary_velocity(canary), book.digests()
        for load, rollout in zip(loads, self.rollouts.values(), strict=True):
            load.finish()
            check_digests(sent, digests_of(rollout.held_weights()), 1)
            check_canary(velocity, rollout.canary_velocity(canary), 1, 0.0)

    def log_probs(self) -> dict[str, Tensor]:
        """Of one batch with noise, of every rollout and as the trainer computes them."""
        request = replace(self.requests(0)[0], window=WINDOW, record_finished=False)
        paths = {name: one.produce(request, algo=NOISY).recorded for name, one in self.rollouts.items()}
        first = paths[PLAIN]
        assert isinstance(first, Trajectories)
        self.trainer.model_config = replace(self.model_config, algo=NOISY)
        try:
            replayed = self.trainer.rescored(first)
        finally:
            self.trainer.model_config = self.model_config
        return {name: path.log_probs for name, path in paths.items()} | {"trainer": replayed.log_probs}


def knows_graphs() -> bool:
    """False for the engine of an older checkout, which this file can be run over."""
    return "cuda_graphs" in inspect.signature(DiffusersRolloutEngine).parameters


def new_rollout(config: DiffusionModelConfig, device: str, graphs: bool) -> DiffusersRolloutEngine:
    """An engine, with CUDA graphs or without."""
    return (
        DiffusersRolloutEngine(config, device, cuda_graphs=True) if graphs else DiffusersRolloutEngine(config, device)
    )


def check_equal(bench: Bench, made: dict[str, list[Any]]) -> None:
    """Raise AssertionError where rollouts made different samples of an iteration, or give others log-probs."""
    for name, batches in made.items():
        for number, (one, plain) in enumerate(zip(batches, made[PLAIN], strict=True)):
            assert torch.equal(one.recorded.latents, plain.recorded.latents), f"{name}: latents of batch {number}"
    found = bench.log_probs()
    for name, log_probs in found.items():
        assert torch.equal(log_probs, found[PLAIN]), f"log-probs of {name}: {(log_probs - found[PLAIN]).abs().max()}"


class Timed:
    """Seconds and GiB of what was done under a name, with the device's work done."""

    def __init__(self, device: str):
        self.on_gpu = device == "cuda"
        self.seconds: dict[str, list[float]] = {}
        self.gib: dict[str, float] = {}

    def __call__(self, name: str, function: Callable[[], Any]) -> Any:
        self._wait()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = function()
        self._wait()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        if self.on_gpu:
            self.gib[name] = max(self.gib.get(name, 0.0), torch.cuda.max_memory_allocated() / 2**30)
        print(f"{name}: {self.seconds[name][-1]:.3f} s", flush=True)
        return result

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Medians, peaks, and what the graphs hold; raises AssertionError at the first difference."""
    timed, images = Timed(bench.device), bench.config.data.train_batch_size * bench.settings.n
    timed("first sync", bench.sync)
    for iteration in range(repeats + 1):
        phase = "" if iteration else "first "
        # In turns, the one that comes first in this iteration second in the next: neither is always warmer.
        names = list(bench.rollouts)[:: 1 if iteration % 2 else -1]
        made = {name: timed(f"{phase}rollout, {name}", partial(bench.sample, name, iteration)) for name in names}
        if iteration < 2:
            check_equal(bench, made)
            print(f"samples and log-probs of iteration {iteration} are equal to the bit", flush=True)
        metrics = timed(f"{phase}update", partial(bench.update, made[PLAIN]))
        assert metrics["old_deviation"] >= 0
        timed(f"{phase}sync of {len(bench.rollouts)}", bench.sync)
    numbers: dict[str, Any] = {"images": images, "grad_norm": metrics["grad_norm"]}
    numbers |= {"seconds": {name: median(values) for name, values in timed.seconds.items()}}
    numbers |= {"spread": {name: max(values) - min(values) for name, values in timed.seconds.items()}}
    return numbers | {"peak GiB": timed.gib}


def parts_of_sync(bench: Bench) -> dict[str, float]:
    """Seconds of what a sync with one rollout is made of."""
    timed, rollout = Timed(bench.device), next(iter(bench.rollouts.values()))
    canary = Canary(bench.prompts(0, 4), rows=bench.settings.batch_size)
    for _ in range(2):
        weights = timed("weights gathered", lambda: dict(bench.trainer.whole_weights()))
        timed("digests of what is sent", partial(digests_of, weights, torch.float32, bench.model_config.dtype))
        timed("weights copied", partial(rollout.load_weights, weights))
        timed("digests of what is held", lambda: digests_of(rollout.held_weights()))
        timed("canary, trainer", lambda: bench.trainer.canary_velocity(canary))
        for name, one in bench.rollouts.items():
            timed(f"canary, {name}", partial(one.canary_velocity, canary))
    return {name: values[-1] for name, values in timed.seconds.items()}


def profiled(name: str, function: Callable[[], Any], seconds: float, rows: int) -> float:
    """Print the kernels and the calls of the driver that take longest; the share of `seconds`, which the same takes
    without a profiler, that the GPU is busy."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        function()
        torch.cuda.synchronize()
    events = [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    busy = covered((event.time_range.start, event.time_range.end) for event in events) / 1e6
    print(
        f"--- {name}: GPU busy {busy:.3f} of {seconds:.3f} s = {busy / seconds:.0%}, {len(events)} kernels and copies"
    )
    averages = profiler.key_averages()
    on_device = [
        one for one in averages if one.device_type == torch.autograd.DeviceType.CUDA and not one.is_user_annotation
    ]
    for one in sorted(on_device, key=lambda one: -one.self_device_time_total)[:rows]:
        print(f"gpu {one.key[:90]:90} {one.count:6} times {one.self_device_time_total / 1e3:8.1f} ms")
    driver = [one for one in averages if one.key.startswith("cu") and one not in on_device]
    for one in sorted(driver, key=lambda one: -one.self_cpu_time_total)[:8]:
        print(f"cpu {one.key[:90]:90} {one.count:6} times {one.self_cpu_time_total / 1e3:8.1f} ms")
    return busy / seconds


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some ranges (start, end)."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(ranges):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def table(numbers: dict[str, Any], sync: dict[str, float]) -> str:
    """Markdown: a row for each kind of rollout, whose iteration has the update and a sync with it alone."""
    seconds, copies = numbers["seconds"], sum(name.startswith("rollout, ") for name in numbers["seconds"])
    shared = ("weights gathered", "digests of what is sent", "weights copied", "digests of what is held")
    lines = [
        "| rollout | rollout s | update s | sync s | images/s | peak GiB: rollout | update |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in (key for key in seconds if key.startswith("rollout, ")):
        name = key.removeprefix("rollout, ")
        synced = sum(sync[part] for part in (*shared, "canary, trainer", f"canary, {name}"))
        rate = numbers["images"] / (seconds[key] + seconds["update"] + synced)
        peaks = " | ".join(f"{numbers['peak GiB'].get(part, 0.0):.2f}" for part in (key, "update"))
        lines.append(f"| {name} | {seconds[key]:.3f} | {seconds['update']:.3f} | {synced:.3f} | {rate:.0f} | {peaks} |")
    return "\n".join([*lines, "", f"Sync with {copies} at once: {seconds[f'sync of {copies}']:.3f} s."])


def build_model(folder: Path, settings: WordsSettings) -> None:
    """The words model, with random weights also where it starts with zeros."""
    if (folder / "model_index.json").is_file():
        return
    pipeline = build_pipeline(settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in pipeline.transformer.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02, generator=generator)
    pipeline.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark_words_iteration"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=15, help="of each profile; 0 makes none")
    parser.add_argument("--compile", action="store_true", help="compile on the CPU too")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    started = time.perf_counter()
    build_model(arguments.work / f"model_{arguments.device}", WordsSettings() if on_gpu else smallest())
    config = recipe() if on_gpu else recipe().with_changes(SMALL)
    changes: dict[str, Any] = {"path": str(arguments.work / f"model_{arguments.device}")}
    changes |= {"compile": True} if arguments.compile else {}
    config = config.with_changes({"actor_rollout_ref": {"model": changes}})
    more: dict[str, Any] = {"device_id": torch.device("cuda:0")} if on_gpu else {}
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **more)
    bench = Bench(config, arguments.device)
    print(f"engines after {time.perf_counter() - started:.1f} s", flush=True)
    numbers = measure(bench, arguments.repeats)
    sync = parts_of_sync(bench)
    numbers["sync"] = sync
    if on_gpu and arguments.rows:
        seconds, made = numbers["seconds"], bench.sample(PLAIN, 0)
        numbers["busy"] = {
            name: profiled(name, partial(bench.sample, name, 0), seconds[f"rollout, {name}"], arguments.rows)
            for name in bench.rollouts
        } | {"update": profiled("update", partial(bench.update, made), seconds["update"], arguments.rows)}
    (arguments.work / "results.json").write_text(json.dumps(numbers, indent=1))
    print(json.dumps(numbers, indent=1))
    print(table(numbers, sync))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
