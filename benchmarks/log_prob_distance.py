# SPDX-License-Identifier: Apache-2.0
"""How far the update's log-probs are from the rollout's before any weight moves, at real size, and what it costs.

    python -m benchmarks.log_prob_distance --model sd3.5-medium --graphs apart one casts
    python -m benchmarks.log_prob_distance --model sd3.5-medium --full --checkpointing --graphs one
    python -m benchmarks.log_prob_distance --model flux.1-dev --full --no-step --checkpointing --graphs one
    python -m benchmarks.log_prob_distance --model sd3.5-medium --engine vllm_omni --graphs eager one
    python -m benchmarks.log_prob_distance --model tiny --device cpu        # that it runs
    python -m benchmarks.log_prob_distance --model tiny-flux --device cpu --engine vllm_omni --graphs eager

`apart` compiles a graph for sampling and another one for the update, `one` lets both run the update's
(`models.runtime.compiled`), `casts` compiles two and has each round where eager code does, `eager` compiles nothing.
Each case is a line of JSON in <work>/results.jsonl: the distance of the rollout (mean and largest), of the trainer's
own rescoring, the largest |ratio - 1|, the share of samples whose ratio leaves the recipe's clip range, and the seconds
of a rollout. Weights are random. `--full` trains all weights; `--no-step` has no AdamW, so that a model fits whose
moments do not.

With `--engine vllm_omni` vLLM-Omni samples, in a process of its own, and the weights of real size are written to
<work> first. Its graphs are its own: `eager` compiles nothing on either side, the others compile both.
"""

import argparse
import io
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import models.rollout.diffusers as rollout_module
import models.training.fsdp as trainer_module
from benchmarks.iteration import advantages_of, move_off_zero, request_of
from benchmarks.real_size import use_random_weights, write_configs
from benchmarks.rollout import build
from models.config.actor import DiffusionActorConfig, DiffusionLossConfig, FSDPConfig, OptimConfig
from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.config.vllm_omni import VllmOmniConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.runtime.compiled import compile_blocks
from models.samples.trajectories import Generated, RolloutRequest, Trajectories
from models.schedulers.noise_keys import NoiseKey
from models.training.fsdp import DiffusersFSDPEngine
from models.training.gradients import clip_gradients
from models.training.micro_batches import ActorBatch


@dataclass(frozen=True)
class Size:
    """What is sampled and trained on: as the recipe of that model does."""

    guidance: dict[str, float]
    plain: dict[str, float]
    lora: tuple[int, int]
    clip: float
    noise_level: float
    window: tuple[int, ...]
    batch: int
    text_tokens: int
    pixels: int = 512
    steps: int = 10


TINY = {
    "tiny": "qwen_image",
    "tiny-sd3": "stable_diffusion_3",
    "tiny-flux": "flux",
    "tiny-klein": "flux_2_klein",
    "tiny-z-image": "z_image",
    "tiny-wan": "wan",
}
"""Name -> the family in `tests/support/tiny_models.py`, whose sizes and guidance are taken."""
SIZES = {
    "tiny": Size({"true_cfg_scale": 4.0}, {}, (4, 8), 1e-5, 0.7, (0, 1), 4, 8, 16, 4),
    "sd3.5-medium": Size({"guidance_scale": 4.5}, {}, (32, 64), 1e-4, 0.7, tuple(range(9)), 24, 205),
    "qwen-image": Size({"true_cfg_scale": 4.0}, {}, (64, 128), 1e-5, 1.2, (0, 1), 8, 128),
    "flux.1-dev": Size(
        {"guidance_scale": 3.5, "true_cfg_scale": 2.0}, {"guidance_scale": 3.5}, (32, 64), 1e-5, 0.7, (0, 1), 8, 512
    ),
    "flux.2-klein-base-4b": Size({"guidance_scale": 4.0}, {}, (32, 64), 1e-5, 0.7, (0, 1), 8, 512),
}


def size_of(name: str) -> Size:
    """Of a model by its name."""
    if name not in TINY or name == "tiny":
        return SIZES[name]
    from tests.support.tiny_models import FAMILIES

    family = FAMILIES[TINY[name]]
    return replace(SIZES["tiny"], guidance=family.guided, plain=family.plain, pixels=family.sizes[0][0] * 2)


def model_config_of(
    name: str, folder: Path, lora: bool, compiled: bool, guided: bool, dtype: str = "bfloat16"
) -> DiffusionModelConfig:
    """The model as a case samples it."""
    size = size_of(name)
    rank, alpha = size.lora if lora else (0, 1)
    return DiffusionModelConfig.load(
        ModelConfig(path=str(folder), dtype=dtype, lora_rank=rank, lora_alpha=alpha, compile=compiled),
        DiffusionPipelineConfig(
            height=size.pixels,
            width=size.pixels,
            num_inference_steps=size.steps,
            **(size.guidance if guided else size.plain),
        ),
        DiffusionRolloutAlgoConfig(sde_type="sde", noise_level=size.noise_level),
    )


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, bool, str, int]]:
    """(label, guided, guidance_gradient, micro-batch of the update) of each case."""
    batch = size_of(arguments.model).batch
    everything = {
        "guided, gradient through the conditional half": (True, "conditional", batch),
        "guided, gradient through both": (True, "both", batch),
        "without guidance": (False, "both", batch),
        "without guidance, update in halves of the batch": (False, "both", batch // 2),
    }
    for number, (label, case) in enumerate(everything.items()):
        if number in arguments.cases:
            yield label, *case


def measure(arguments: argparse.Namespace, graph: str) -> None:
    """All cases of one way to compile."""
    size, device, folder = size_of(arguments.model), arguments.device, arguments.work / arguments.model
    torch._dynamo.reset()
    torch._inductor.config.emulate_precision_casts = graph == "casts"
    chosen = compile_blocks if graph == "one" else _compile_apart
    rollout_module.compile_blocks = trainer_module.compile_blocks = chosen  # type: ignore[attr-defined]
    rollout_module.compile_decoder = lambda vae: None  # type: ignore[attr-defined]  # nothing is decoded here
    lora, compiled = not arguments.full, graph != "eager"
    config = model_config_of(arguments.model, folder, lora, compiled, True, arguments.dtype)
    if arguments.model not in TINY and arguments.engine == "diffusers":
        use_random_weights(DiffusionModelBase.get_class(config), device)
    actor = DiffusionActorConfig(
        diffusion_loss=DiffusionLossConfig(clip_ratio=size.clip),
        optim=OptimConfig(lr=1e-12, weight_decay=0.0),  # no weight moves: every case begins with the same ones
        fsdp_config=FSDPConfig(gradient_checkpointing=arguments.checkpointing, shard_frozen=False),
    )
    if arguments.no_step:
        trainer_module.allocate_adam_state = lambda optimizer: None  # type: ignore[attr-defined]
    trainer = (Unmoved if arguments.no_step else DiffusersFSDPEngine)(config, actor, device)
    trainer.initialize()
    move_off_zero(trainer)
    elsewhere = arguments.engine == "vllm_omni"
    rollout: Rollout = (
        OmniElsewhere(config, size.batch, compiled) if elsewhere else DiffusersRolloutEngine(config, device)
    )
    for label, guided, gradient, micro in cases(arguments):
        config = model_config_of(arguments.model, folder, lora, compiled, guided, arguments.dtype)
        trainer.model_config = rollout.model_config = config
        trainer.actor_config = actor.model_copy(
            update={"guidance_gradient": gradient, "ppo_micro_batch_size_per_gpu": micro}
        )
        line = {"model": arguments.model, "dtype": arguments.dtype, "engine": arguments.engine, "lora": lora}
        line |= {"graph": graph, "case": label}
        record = gradient == "conditional"
        request = asked(arguments.model, config, guided, record)
        undecoded = replace(request, outputs=frozenset())
        sync(trainer, rollout)
        append(arguments.work, line | distances(trainer, rollout, undecoded, arguments.repeats))
    if isinstance(rollout, OmniElsewhere):
        rollout.shutdown()


def asked(name: str, config: DiffusionModelConfig, guided: bool, record: bool) -> RolloutRequest:
    """A batch of four prompts; a tiny family's have different lengths and what that family wants."""
    size = size_of(name)
    if name not in TINY or name == "tiny":
        return request_of(config, size.text_tokens, size.window, size.batch, record, iteration=0)
    from tests.support.tiny_models import embeddings_of

    torch.manual_seed(0)
    prompts = embeddings_of(config, lengths=(5, 3, 4, 5), negative_length=4 if guided else None)
    keys = tuple(NoiseKey(0, 0, f"prompt-{i % 4}", i // 4) for i in range(size.batch))
    return RolloutRequest(keys, prompts, torch.arange(size.batch) % 4, size.window, record_unconditional=record)


class OmniElsewhere:
    """vLLM-Omni in a process of its own, since both it and the trainer set up torch.distributed for theirs.

    Messages are bytes of `torch.save`: ("load", weights), ("produce", (request, pipeline)) or ("end", None), and the
    answer, or what went wrong.
    """

    def __init__(self, config: DiffusionModelConfig, batch: int, compiled: bool):
        self.model_config = config
        self.pipe, theirs = Pipe()
        process = get_context("spawn").Process(target=serve, args=(theirs, config, batch, compiled), daemon=False)
        process.start()
        theirs.close()
        self.process, self.weights = process, dict[str, Tensor]()
        self._answer()

    def begin_load(self) -> "OmniElsewhere":
        self.weights = {}
        return self

    def take(self, weights: Mapping[str, Tensor]) -> None:
        self.weights |= {name: weight.detach().cpu() for name, weight in weights.items()}

    def finish(self) -> None:
        self._ask("load", self.weights)

    def produce(self, request: RolloutRequest) -> Generated:
        return self._ask("produce", (request, self.model_config.pipeline))

    def shutdown(self) -> None:
        self._ask("end", None)
        self.process.join()

    def _ask(self, order: str, given: Any) -> Any:
        self.pipe.send_bytes(_packed((order, given)))
        return self._answer()

    def _answer(self) -> Any:
        fine, answer = _unpacked(self.pipe.recv_bytes())
        if not fine:
            raise RuntimeError(f"vLLM-Omni's process: {answer}")
        return answer


def serve(pipe: Connection, config: DiffusionModelConfig, batch: int, compiled: bool) -> None:
    """The other process of `OmniElsewhere`."""
    from models.rollout.vllm_omni.engine import VllmOmniRolloutEngine

    settings = VllmOmniConfig(
        attention_backend="TORCH_SDPA" if torch.cuda.is_available() else None, enforce_eager=not compiled
    )
    engine = VllmOmniRolloutEngine(config, settings, max_num_seqs=batch)
    pipe.send_bytes(_packed((True, None)))
    while True:
        order, given = _unpacked(pipe.recv_bytes())
        try:
            if order == "load":
                engine.load_weights(given)
            made = engine.produce(*given) if order == "produce" else None
        except Exception as error:
            pipe.send_bytes(_packed((False, str(error))))
            continue
        if order == "end":
            engine.shutdown()
        pipe.send_bytes(_packed((True, made)))
        if order == "end":
            return


def _packed(message: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(message, stream)
    return stream.getvalue()


def _unpacked(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)


Rollout = DiffusersRolloutEngine | OmniElsewhere


class Unmoved(DiffusersFSDPEngine):
    """A trainer that has gradients, and no optimiser to move its weights."""

    def _optimizer_step(self) -> float | None:
        norm = clip_gradients(list(self._trained.held().values()), self.actor_config.optim.clip_grad)
        self.optimizer.zero_grad()
        return norm.item()


def sync(trainer: DiffusersFSDPEngine, rollout: Rollout) -> None:
    """Give the rollout the trainer's weights, one tensor after the other on the device."""
    load = rollout.begin_load()
    for name, weight in trainer.whole_weights():
        load.take({name: weight})
    load.finish()


def distances(trainer: DiffusersFSDPEngine, rollout: Rollout, request: RolloutRequest, repeats: int) -> dict[str, Any]:
    """Numbers of one case; the rollout is timed `repeats` times."""
    began = _now()
    trajectories = rollout.produce(request).recorded
    assert isinstance(trajectories, Trajectories)
    first = _now() - began
    seconds = []
    for _ in range(repeats):
        began = _now()
        rollout.produce(request)
        seconds.append(_now() - began)
    batch, began = len(trajectories), _now()
    met = trainer.update_policy([ActorBatch([(trajectories, advantages_of(batch))], batch)])
    updated = _now() - began
    again, began = rollout.produce(request).recorded, _now()
    rescored = trainer.rescored(replace(trajectories, unconditional=None))
    rescoring = _now() - began
    own = trainer.update_policy([ActorBatch([(rescored, advantages_of(batch))], batch)])
    assert isinstance(again, Trajectories)
    return {
        "mean": met["logprob_abs_diff/mean"],
        "max": met["logprob_abs_diff/max"],
        "ratio": met["ratio_deviation/max"],
        "clipped": met["pg_clipfrac"],
        "gradient": met["grad_norm"],
        "rescored mean": own["logprob_abs_diff/mean"],
        "rescored max": own["logprob_abs_diff/max"],
        "rescored clipped": own["pg_clipfrac"],
        "rollout repeats": torch.equal(again.log_probs, trajectories.log_probs),
        "rollout s": min(seconds, default=None),
        "first rollout s": first,
        "first update s": updated,
        "rescoring s": rescoring,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }


def _compile_apart(adapter: type[DiffusionModelBase], module: Any) -> None:
    """As it is usually done: a graph for every mode of autograd."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 512
    for block in adapter.transformer_blocks(module):
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def append(work: Path, line: dict[str, Any]) -> None:
    """Keep a case's line, and show it."""
    text = json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in line.items()})
    with (work / "results.jsonl").open("a") as stream:
        stream.write(text + "\n")
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(dict.fromkeys([*TINY, *SIZES])), default="tiny")
    parser.add_argument("--engine", choices=["diffusers", "vllm_omni"], default="diffusers", help="what samples")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--graphs", nargs="+", choices=["apart", "one", "casts", "eager"], default=["apart", "one"])
    parser.add_argument("--cases", nargs="+", type=int, default=[0, 1, 2, 3], help="numbers, in the order of `cases`")
    parser.add_argument("--full", action="store_true", help="train all weights instead of LoRA")
    parser.add_argument("--no-step", action="store_true", help="keep no moments of AdamW, and take no step")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--repeats", type=int, default=3, help="rollouts that are timed")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark_log_prob_distance"))
    arguments = parser.parse_args()
    folder = arguments.work / arguments.model
    if not (folder / "model_index.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        if arguments.model in TINY:
            from tests.support.tiny_models import FAMILIES

            FAMILIES[TINY[arguments.model]].save(folder)
        elif arguments.engine == "vllm_omni":
            build(arguments.model, folder, arguments.device)
        else:
            write_configs(arguments.model, folder)
    on_gpu = arguments.device == "cuda"
    settings: dict[str, Any] = {"device_id": torch.device("cuda:0")} if on_gpu else {}
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1, **settings)
    for graph in arguments.graphs:
        measure(arguments, graph)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
