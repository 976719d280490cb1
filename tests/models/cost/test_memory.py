# SPDX-License-Identifier: Apache-2.0
"""Memory: what a forward leaves for its backward, counted on real tensors; the sum; and the refusal before a start."""

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from transformers import AutoModel

from benchmarks.real_size import KL_VAE, write_configs
from models.cost.memory import GIB, Need, kept_by_a_sampler, rollout_need, update_need
from models.cost.meta_pass import KnownResults, PassCost, decoding_bytes, pass_cost
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import to_uint8
from models.families.velocity import velocity_field
from models.rollout.diffusers import DiffusersRolloutEngine
from models.runtime.recomputation import recomputed
from models.samples.file import read_samples
from models.samples.trajectories import LATENTS, PICTURES, FinishedLatents, PromptTable, Trajectories
from models.weights.trainable import make_trainable, trainable
from tasks.actors.batch_files import write_batch
from tasks.actors.memory import GpuPeak, measures_gpu_memory, peak_metrics, peaks_since_last_time
from tasks.config.recipes import load_recipe
from tasks.config.tree import TrainConfig
from tasks.run.capacity import (
    DoesNotFit,
    Model,
    Needs,
    check_disk,
    checkpoint_bytes,
    colocated_encoders,
    kept_rollout_bytes,
    needs,
    samplers_on_a_gpu,
)
from tasks.run.gpu_capacity import beside_others, check_fits, shortfall, warn_of_others
from tasks.run.host_check import check_host
from tasks.system.gpu_memory import InUse, gpu_memory_in_use
from tests.models.training.test_engine import batch_of, trainer
from tests.support.helpers import (
    actor_config,
    gloo_world,
    model_config,
    prompt_table,
    rollout_request,
    save_tiny_model,
)
from tests.support.published_models import published
from tests.support.tiny_models import FAMILIES, embeddings_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def four_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a block is a small part."""
    return save_tiny_model(tmp_path_factory.mktemp("four_blocks"), layers=4)


def trainable_module(config: DiffusionModelConfig) -> torch.nn.Module:
    """The real denoiser, as a trainer has it; gradients are dropped as they come."""
    adapter = DiffusionModelBase.get_class(config)
    module = adapter.load_transformer(config, torch.float32).train()
    make_trainable(adapter, module, config)
    for parameter in trainable(module).values():
        parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    return module


def saved_for_backward(config: DiffusionModelConfig, prompts: PromptTable, samples: int) -> int:
    """Bytes that autograd really keeps after a forward of so many samples; weights do not count."""
    adapter, module = DiffusionModelBase.get_class(config), trainable_module(config)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    velocity = velocity_field(adapter, module, config, prompts, torch.zeros(samples, dtype=torch.long))
    latents = torch.randn(samples, *adapter.latent_shape(config))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        velocity(latents, torch.tensor(500.0))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_activations_are_what_autograd_keeps(name: str, tiny_folder: Callable[[str], Path]) -> None:
    """Two sizes of picture, two micro-batches, LoRA and all weights, without and with guidance."""
    family = FAMILIES[name]
    (height, width), _ = family.sizes
    cases = (
        ((height, width), 2, {"lora_rank": 4}, family.plain),
        ((2 * height, 2 * width), 3, {}, family.guided),
    )
    for size, samples, weights, pipeline in cases:
        config = model_config(tiny_folder(name), height=size[0], width=size[1], **weights, **pipeline)
        guided = DiffusionModelBase.get_class(config).is_guided(config.pipeline)
        prompts = embeddings_of(config, lengths=(24,), negative_length=24 if guided else None)
        counted = saved_for_backward(config, prompts, samples)
        assert pass_cost(config, prompts, samples).saved_bytes == pytest.approx(counted, rel=0.25)


def test_known_results_are_torchs_own() -> None:
    """Also of equal numbers of another type, of other strides, and of what shares its argument's memory."""
    given = torch.empty(4, 6, dtype=torch.int64, device="meta")
    asked: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.aten.mul.Tensor, (given, number)) for number in (2, 2.0, True, given, given.float(), given.half())
    ]
    asked += [(torch.ops.aten.clone.default, (tensor,)) for tensor in (given.T, given.view(6, 4), given[1:])]
    asked += [(torch.ops.aten.sum.dim_IntList, (given, [axis], keep)) for axis in (0, 1) for keep in (False, True)]
    asked += [(torch.ops.aten._unsafe_view.default, (given, [8, 3])), (torch.ops.aten.t.default, (given,))]
    own = [function(*arguments) for function, arguments in asked]
    with KnownResults():
        found = [[function(*arguments) for _ in range(3)] for function, arguments in asked]
    for expected, results in zip(own, found, strict=True):
        shares = expected.untyped_storage() is given.untyped_storage()
        for result in results:
            assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
            assert (result.untyped_storage() is given.untyped_storage()) == shares
    assert len({id(result.untyped_storage()) for result in found[0]}) == 3


def test_known_results_may_be_several_and_some_of_them_left_out() -> None:
    given, scale = torch.empty(4, 6, device="meta"), torch.empty(6, device="meta")
    normalised = (given, [6], scale, scale, 1e-6)
    mean, deviation = torch.ops.aten.native_layer_norm(*normalised)[1:]
    for mask in ([True, True, False], [True, False, False]):
        of_backward = (given, given, [6], mean, deviation, scale, scale, mask)
        for function, arguments in (
            (torch.ops.aten.native_layer_norm.default, normalised),
            (torch.ops.aten.native_layer_norm_backward.default, of_backward),
        ):
            own = function(*arguments)
            with KnownResults():
                for results in [function(*arguments) for _ in range(3)]:
                    assert [r if r is None else r.shape for r in results] == [r if r is None else r.shape for r in own]


def peak_of(compute: Callable[[], Any], folder: Path) -> int:
    """The most that torch's allocator gave out at a time while `compute` ran, by its own record."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    profiler.export_chrome_trace(str(folder / "memory.json"))
    events = [e for e in json.loads((folder / "memory.json").read_text())["traceEvents"] if e["name"] == "[memory]"]
    live = itertools.accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"]))
    return max(live)


# What is kept for the backward, the larger part of a peak, is quick for all of them.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("flux", "flux_2_klein", "z_image") else [])
        for name in FAMILIES
    ],
)
def test_peaks_are_those_of_the_allocator(
    name: str, tiny_folder: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sampling, decoding, and forward and backward without and with gradient checkpointing. Nothing is told."""
    family, samples = FAMILIES[name], 3
    height, width = family.sizes[0]
    times = 2 if name in ("stable_diffusion_3", "wan") else 4  # these have no positions beyond
    config = model_config(tiny_folder(name), height=times * height, width=times * width, lora_rank=4, **family.plain)
    prompts = embeddings_of(config, lengths=(24,))
    adapter = DiffusionModelBase.get_class(config)
    module: Any = trainable_module(config)
    velocity = velocity_field(adapter, module, config, prompts, torch.zeros(samples, dtype=torch.long))
    latents, timestep = torch.randn(samples, *adapter.latent_shape(config)), torch.tensor(500.0)

    def train() -> None:
        velocity(latents, timestep)[0].sum().backward()

    cost = pass_cost(config, prompts, samples)
    assert cost.training_bytes == pytest.approx(peak_of(train, tmp_path), rel=0.1)
    with torch.no_grad():  # Qwen-Image's rotary tables, a fifth of so little, lie on the CPU before
        assert cost.sampling_bytes == pytest.approx(peak_of(lambda: velocity(latents, timestep), tmp_path), rel=0.25)
    module.enable_gradient_checkpointing(recomputed)
    less = pass_cost(config, prompts, samples, checkpointing=True).training_bytes
    assert less == pytest.approx(peak_of(train, tmp_path), rel=0.1)
    assert less < 0.8 * cost.training_bytes

    vae = adapter.load_vae(config)
    with torch.no_grad():
        decoded = peak_of(lambda: to_uint8(adapter.decode(vae, config, latents)), tmp_path)
    assert decoding_bytes(config, samples)[1] == pytest.approx(decoded, rel=0.2)
    # Prefect's threads of tests before this one go on.
    told = [record.message for record in caplog.records if not record.name.startswith("prefect")]
    assert not told, "a run would begin with it"


def test_sizes_that_were_measured_on_a_gpu(tmp_path: Path) -> None:
    """Stable Diffusion 3.5 medium, 512 x 512, LoRA, batch 32, eager, on one H200: 66.6 GiB allocated at most."""
    _, config = published("sd3.5-medium", tmp_path, dtype="bfloat16", lora_rank=32)
    prompts = embeddings_of(config, lengths=(205,)).to("meta")
    prompts = replace(prompts, prompt_embeds_mask=torch.ones(1, 205, dtype=torch.bool))
    cost = pass_cost(config, prompts, samples=32)
    need = update_need(cost, config, actor_config(ppo_micro_batch_size_per_gpu=32), world_size=1)
    assert need.gib == pytest.approx(66.6, rel=0.05)


def test_what_a_rollout_workers_process_keeps_was_measured_on_gpus(tmp_path: Path) -> None:
    """Stable Diffusion 3.5 medium, 512 x 512, LoRA, batch 24, compiled, on two H100s: its tensors took 12.5 GiB at
    most, its process 19.5 on the card, or 21.2 where its weights came by NCCL (docs/measuring.md)."""
    _, config = published("sd3.5-medium", tmp_path, dtype="bfloat16", lora_rank=32, compile=True)
    vae = {"_class_name": "AutoencoderKL", **KL_VAE}
    (tmp_path / "vae" / "config.json").write_text(json.dumps(vae))
    prompts = embeddings_of(config, lengths=(205,)).to("meta")
    prompts = replace(prompts, prompt_embeds_mask=torch.ones(1, 205, dtype=torch.bool))
    cost = pass_cost(config, prompts, samples=24)
    need = rollout_need(cost, config, decoding_bytes(config, 24), samples=24)
    assert need.gib == pytest.approx(12.5, rel=0.1)
    assert 21.2 < need.with_kept(kept_by_a_sampler(config, "diffusers")).gib < 1.3 * 21.2


def test_what_qwen_images_rollout_and_update_take_was_measured_on_h200s(tmp_path: Path) -> None:
    """512 x 512, guided, LoRA 64, batch 8, compiled: a worker's tensors took 47.4 GiB and its process 50.8, the
    trainer's 51.7 alone. By five times what passes the two would not fit on one H200 (benchmarks/measured)."""
    _, config = published("qwen-image", tmp_path, dtype="bfloat16", lora_rank=64, compile=True)
    vae = tmp_path / "vae" / "config.json"
    vae.write_text(json.dumps(json.loads(vae.read_text()) | {"_class_name": "AutoencoderKLQwenImage"}))
    cost = pass_cost(config, embeddings_of(config, (32,), 32), samples=8, checkpointing=True)
    rollout = rollout_need(cost, config, decoding_bytes(config, 8), samples=8)
    assert rollout.gib == pytest.approx(47.4, rel=0.1)
    kept = rollout.with_kept(kept_by_a_sampler(config, "diffusers")).gib
    assert 50.8 < kept < 1.3 * 50.8
    update = update_need(
        cost, config, actor_config(ppo_micro_batch_size_per_gpu=8, gradient_checkpointing=True), world_size=1
    )
    assert update.gib == pytest.approx(51.7, rel=0.1)
    assert update.gib + kept < 0.85 * 139.8


@pytest.mark.parametrize(
    ("decoder", "engine", "compiled", "times"),
    [
        ("AutoencoderKL", "diffusers", True, 2.5),
        ("AutoencoderKL", "diffusers", False, 5),
        ("AutoencoderKL", "vllm_omni", True, 5),
        ("AutoencoderKLWan", "diffusers", True, 5),
        ("AutoencoderKLQwenImage", "diffusers", True, 2),
        ("AutoencoderKLQwenImage", "diffusers", False, 5),
    ],
)
def test_a_decoder_that_is_not_compiled_keeps_more(
    tmp_path: Path, decoder: str, engine: str, compiled: bool, times: float
) -> None:
    """45 GiB in use eager and by vLLM-Omni, 22 compiled, after batches of 32 (docs/vllm-omni.md)."""
    _, config = published("sd3.5-medium", tmp_path, dtype="bfloat16", compile=compiled)
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"_class_name": decoder}))
    assert kept_by_a_sampler(config, engine) == times


COST = PassCost(
    samples=4,
    parameters=1000 * GIB // 4,
    frozen=0,
    trained=1000 * GIB // 4,
    blocks=(100 * GIB // 4, 900 * GIB // 4),
    trained_blocks=(100 * GIB // 4, 900 * GIB // 4),
    frozen_blocks=(100 * GIB // 4, 900 * GIB // 4),
    sampling_flops=1.0,
    training_flops=3.0,
    recomputed_flops=0.0,
    sampling_bytes=8 * GIB,
    saved_bytes=30 * GIB,
    training_bytes=40 * GIB,
)
"""Of all weights, 1000 GiB in fp32."""


def test_the_sum_of_an_update(tiny_model: Path) -> None:
    """All weights in fp32 over 10 ranks: 100 GiB each for weights and copies, and whole gradients on every rank."""
    need = update_need(COST, model_config(tiny_model), actor_config(), world_size=10, copies=2, frozen_models=1)
    sizes = {name: size / GIB for name, size in (need.resident | need.passing).items()}
    assert sizes == {
        "weights": 100,
        "AdamW": 200,
        "copies of the trained weights": 200,
        "reference and teacher": 100,
        "gathered reference and teacher": 0,
        "gradients": 1000,
        "gathered weights": 100 + 2 * 100,
        "activations of 4 samples": 40,
    }
    assert need.gib == sum(sizes.values())
    keeps = actor_config(reshard_after_forward=False)
    kept = update_need(COST, model_config(tiny_model), keeps, world_size=10, frozen_models=2)
    assert kept.passing["gathered weights"] / GIB == 1000
    assert kept.resident["gathered reference and teacher"] / GIB == 2 * 1000
    assert need.sentence().startswith("gradients 1000.0, gathered weights 300.0, ")


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        (40, {"gradients": 1, "gathered weights": 5 + 2 * 0.25, "activations of 4 samples": 40}),
        (10, {"gathered reference or teacher": 5 + 2 * 10, "activations of 4 samples": 8}),
    ],
)
def test_of_the_teachers_pass_and_the_policys_the_larger_is_counted(
    tiny_model: Path, activations: int, expected: dict[str, float]
) -> None:
    """One comes after the other. The teacher's is larger where the policy's blocks are in float8, of which nothing is
    gathered, and activations are few: of 50 GiB in bf16 45 are in blocks of up to 10."""
    blocks, lora = (5 * GIB, 45 * GIB // 2), GIB // 4
    cost = replace(
        COST,
        parameters=25 * GIB,
        frozen=25 * GIB,
        trained=lora,
        blocks=(lora // 2, lora),
        trained_blocks=(lora // 2, lora),
        training_bytes=activations * GIB,
        float8=(blocks[1], 0),
        frozen_blocks=blocks,
    )
    model = model_config(tiny_model, lora_rank=4, dtype="bfloat16")
    need = update_need(cost, model, actor_config(), world_size=10, frozen_models=1)
    assert {name: size / GIB for name, size in need.passing.items()} == expected
    assert need.resident["gathered reference and teacher"] == 0
    alone = update_need(cost, model, actor_config(), world_size=10)
    assert alone.passing.keys() == {"gradients", "gathered weights", "activations of 4 samples"}


def test_the_gradients_of_a_single_pass_are_divided_block_by_block(tiny_model: Path) -> None:
    """Of 1000 GiB the largest block's 100 and those of no block, as many; or the others' shards, in the place of
    activations."""
    model = model_config(tiny_model)
    for ranks, activations, expected in ((10, 40, 100 + 100), (2, 40, 100 + 450 - 40), (1, 0, 1000), (1, 950, 200)):
        cost = replace(COST, training_bytes=activations * GIB)
        need = update_need(cost, model, actor_config(), world_size=ranks, single_pass=True)
        assert need.passing["gradients"] / GIB == pytest.approx(expected)
    offloaded = update_need(COST, model, actor_config(param_offload=True), world_size=10, single_pass=True)
    assert offloaded.passing["gradients"] / GIB == 200


@pytest.mark.parametrize(("offloads", "expected"), [(False, 100 + 200), (True, 200)])
def test_gradients_that_every_pass_divides_are_a_shard_and_a_block(
    tiny_model: Path, offloads: bool, expected: float
) -> None:
    """Of 1000 GiB a tenth, the largest block's 100 and those of no block, as many."""
    settings = actor_config(shard_gradients=True, param_offload=offloads)
    need = update_need(COST, model_config(tiny_model), settings, world_size=10)
    assert need.passing["gradients"] / GIB == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lora_rank", "world_size", "settings", "activations", "expected"),
    [
        (4, 4, {"shard_frozen": False}, 8, 4),
        (4, 4, {"shard_frozen": False}, 2, 4 + 4 + 1 - 2),
        (4, 4, {"shard_frozen": False, "shard_gradients": True}, 2, 4 + 4 + 1 - 2),
        (4, 4, {"shard_frozen": False, "param_offload": True}, 2, 4 + 4 - 2),
        (4, 1, {}, 2, 4 + 4 + 4 - 2),
        (0, 1, {}, 2, 4 + 4 + 4 - 2),
    ],
)
def test_gradients_that_are_divided_all_at_once_are_there_twice(
    tiny_model: Path, lora_rank: int, world_size: int, settings: dict[str, Any], activations: int, expected: int
) -> None:
    """Of 4 GiB of trained weights those of the backward and those that are added over the ranks, of which a rank keeps
    its part; the activations are gone by then."""
    cost = replace(COST, trained=GIB, frozen=COST.parameters, training_bytes=activations * GIB)
    config = model_config(tiny_model, lora_rank=lora_rank, dtype="bfloat16")
    kept = actor_config(reshard_after_forward=False, **settings)
    for single in (False, True):
        need = update_need(cost, config, kept, world_size=world_size, single_pass=single)
        assert need.passing["gradients"] / GIB == pytest.approx(expected)


def bytes_held(module: torch.nn.Module, offloads: bool = False) -> int:
    """Of a module's parameters, what lies on this rank's device: shards do not where the trainer offloads them."""
    kept = [p for p in module.parameters() if not (offloads and isinstance(p, DTensor))]
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in kept)


def fsdp_weights(module: torch.nn.Module) -> list[Any]:
    """FSDP's own entry of each weight that it has sharded."""
    groups = [part._get_fsdp_state()._fsdp_param_group for part in module.modules() if isinstance(part, FSDPModule)]
    return [weight for group in groups if group for weight in group.fsdp_params]


def gradient_bytes(module: torch.nn.Module) -> int:
    """Of whole gradients and their shards."""
    found = 0
    for weight in fsdp_weights(module):
        whole = weight.unsharded_accumulated_grad
        if whole is None and hasattr(weight, "_unsharded_param"):
            whole = weight._unsharded_param.grad
        shard = weight.sharded_param.grad
        found += 0 if whole is None else whole.nbytes
        found += 0 if shard is None else shard.to_local().nbytes
    return found


def gradients_of_steps(folder: Path) -> list[int]:
    """Most bytes of gradients on a rank in an optimiser step of one pass, of three, and of three that divide them."""
    config = model_config(folder)
    after_block = FSDPParamGroup.post_backward
    found = []
    for window, divides in (((0,), False), ((0, 1, 2), False), ((0, 1, 2), True)):
        engine, seen = trainer(config, shard_gradients=divides), list[int]()

        def looked(self: FSDPParamGroup, *arguments: Any, module: torch.nn.Module, seen: list[int]) -> None:
            seen.append(gradient_bytes(module))
            after_block(self, *arguments)

        _, paths = DiffusersRolloutEngine(config).generate(rollout_request(lengths=(5, 3), window=window))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FSDPParamGroup, "post_backward", partialmethod(looked, module=engine.module, seen=seen))
            engine.update_policy([batch_of(paths, torch.tensor([1.0, -1.0, 0.5, -0.5]))])
        found.append(max(seen))
    return found


HELD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"shard_frozen": False}),
    ({}, {"shard_frozen": False, "param_offload": True}),
    ({"frozen_dtype": "float8"}, {}),
    ({"frozen_dtype": "float8", "dtype": "bfloat16"}, {}),
]


def weights_held(folder: Path) -> list[tuple[int, int]]:
    """Bytes of policy and teacher on a rank's device, for each of some settings."""
    found = []
    for model, settings in HELD:
        config = model_config(folder, lora_rank=4, **model)
        engine = trainer(config, loss_mode="distill_kl", teacher_path=str(folder), **settings)
        assert engine.teacher is not None
        offloads = settings.get("param_offload", False)
        found.append((bytes_held(engine.module, offloads), bytes_held(engine.teacher, offloads)))
    return found


def copies_held(module: torch.nn.Module) -> int:
    """Bytes of gathered copies of what FSDP has sharded."""
    copies = [weight._unsharded_param for weight in fsdp_weights(module) if hasattr(weight, "_unsharded_param")]
    return sum(copy.untyped_storage().nbytes() for copy in copies)


def copies_at_once(folder: Path) -> list[tuple[int, int, int, int]]:
    """Bytes of the gathered copies of policy and teacher during an update, with blocks that are let go after a forward
    and without: most of each alone, of both at once, and the teacher's after it."""
    found, gather = [], FSDPParamGroup.wait_for_unshard
    for reshards in (True, False):
        config = model_config(folder, lora_rank=4)
        _, paths = DiffusersRolloutEngine(config).generate(rollout_request(lengths=(5, 3), record_means=True))
        engine = trainer(config, loss_mode="distill_kl", teacher_path=str(folder), reshard_after_forward=reshards)
        assert engine.teacher is not None
        modules, seen = (engine.module, engine.teacher), list[tuple[int, int]]()

        def looked(self: FSDPParamGroup, *modules: torch.nn.Module, seen: list[tuple[int, int]]) -> None:
            gather(self)
            policy, teacher = map(copies_held, modules)
            seen.append((policy, teacher))

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FSDPParamGroup, "wait_for_unshard", partialmethod(looked, *modules, seen=seen))
            engine.update_policy([batch_of(paths, torch.tensor([1.0, -1.0, 0.5, -0.5]))])
        policy, teacher = (max(of_one) for of_one in zip(*seen, strict=True))
        found.append((policy, teacher, max(map(sum, seen)), copies_held(engine.teacher)))
    return found


Measured = tuple[list[int], list[tuple[int, int]], list[tuple[int, int, int, int]]]


def measured_on_a_rank(rank: int, folder: Path) -> Measured:
    return gradients_of_steps(folder), weights_held(folder), copies_at_once(folder)


@pytest.fixture(scope="module")
def on_two_ranks(four_blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """What the first of two ranks holds: of gradients, of weights, and of gathered ones."""
    return gloo_world(measured_on_a_rank, 2, tmp_path_factory.mktemp("ranks"), four_blocks)[0]


def test_gradients_are_those_that_an_engine_holds(four_blocks: Path, on_two_ranks: Measured) -> None:
    """Of one pass most are divided when the last come, and activations are gone; of three passes none. What this model
    computes for nothing has no gradient."""
    config = model_config(four_blocks)
    cost = replace(pass_cost(config, prompt_table((5,)), 4), training_bytes=0)
    one, three, divided = on_two_ranks[0]
    for held, single, divides in ((one, True, False), (three, False, False), (divided, False, True)):
        settings = actor_config(shard_gradients=divides)
        need = update_need(cost, config, settings, world_size=2, single_pass=single)
        assert held == pytest.approx(need.passing["gradients"], rel=0.15)
    assert max(one, divided) < 0.8 * three


def test_weights_are_those_that_an_engine_holds(four_blocks: Path, on_two_ranks: Measured) -> None:
    """Sharded, whole and in float8; the teacher is whole as the policy is, and never in float8."""
    blocks = pass_cost(model_config(four_blocks), prompt_table((5,)), 4).frozen_blocks
    for (model, settings), (policy, teacher) in zip(HELD, on_two_ranks[1], strict=True):
        config = model_config(four_blocks, lora_rank=4, **model)
        cost = pass_cost(config, prompt_table((5,)), 4)
        need = update_need(cost, config, actor_config(**settings), world_size=2, frozen_models=1)
        assert cost.frozen_blocks == blocks, "what is in float8 is not left out"
        assert policy == pytest.approx(need.resident["weights"], rel=0.01)
        assert teacher == pytest.approx(need.resident["reference and teacher"], rel=0.01)


def test_a_teacher_is_gathered_before_the_policy_or_stays_so(four_blocks: Path, on_two_ranks: Measured) -> None:
    """A gathered block has gone when the policy's come, unless it is to stay: then all do, between updates too."""
    config, (resharded, kept) = model_config(four_blocks, lora_rank=4), on_two_ranks[2]
    cost = pass_cost(config, prompt_table((5,)), 4)
    policy, teacher, both, after = resharded
    assert (both, after) == (policy, 0)
    largest, blocks = cost.frozen_blocks
    assert teacher == 4 * (cost.parameters - blocks + largest), "the CPU gathers no block ahead"
    assert teacher < policy, "which has LoRA's weights besides"
    need = update_need(cost, config, actor_config(), world_size=2, frozen_models=1)
    assert need.passing.keys() == {"gradients", "gathered weights", "activations of 4 samples"}
    policy, teacher, both, after = kept
    need = update_need(cost, config, actor_config(reshard_after_forward=False), world_size=2, frozen_models=1)
    assert (policy, teacher, after) == (
        need.passing["gathered weights"],
        need.resident["gathered reference and teacher"],
        teacher,
    )
    assert both == policy + teacher


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float8_weights_of_a_rollout_are_counted_as_it_holds_them(tiny_model: Path, dtype: str) -> None:
    settings = {"lora_rank": 4, "frozen_dtype": "float8", "dtype": dtype}
    config = model_config(tiny_model, **settings)
    cost = pass_cost(config, prompt_table((5,)), 4)
    held = bytes_held(DiffusersRolloutEngine(config).transformer)
    assert rollout_need(cost, config, (0, 0), 1).resident["weights"] == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("param_dtype", [None, "bfloat16"])
def test_a_lone_rank_has_copies_of_what_it_casts(one_rank: None, tiny_model: Path, param_dtype: str | None) -> None:
    """With LoRA; where the formats agree it computes with the frozen weights themselves."""
    config = model_config(tiny_model, lora_rank=4)
    engine = trainer(config, param_dtype=param_dtype, reshard_after_forward=False)
    _, paths = DiffusersRolloutEngine(config).generate(rollout_request(lengths=(5, 3, 7)))
    engine.rescored(paths)
    copies = [weight._unsharded_param for weight in fsdp_weights(engine.module)]
    cost = pass_cost(config, prompt_table((5,)), 4)
    need = update_need(cost, config, engine.actor_config, world_size=1)
    of_lora = sum(copy.nbytes for copy in copies if copy.requires_grad)
    held = sum(copy.nbytes for copy in copies)
    assert (held > of_lora) == (param_dtype is not None)
    assert need.passing["gathered weights"] == pytest.approx(held if held > of_lora else 0, rel=0.01)


@pytest.mark.parametrize(
    ("model", "settings", "gone"),
    [
        ({}, {"param_offload": True}, {"weights", "AdamW", "copies of the trained weights", "reference and teacher"}),
        ({}, {"optimizer_offload": True}, {"AdamW"}),
        ({"lora_rank": 4}, {"shard_frozen": False}, {"gathered weights"}),
    ],
)
def test_what_lies_elsewhere_needs_nothing(
    tiny_model: Path, model: dict[str, int], settings: dict[str, bool], gone: set[str]
) -> None:
    config, arguments = model_config(tiny_model, **model), {"world_size": 10, "copies": 1, "frozen_models": 1}
    usual, need = (update_need(COST, config, actor_config(**given), **arguments) for given in ({}, settings))
    before, now = usual.resident | usual.passing, need.resident | need.passing
    assert {name for name, size in now.items() if before[name] and not size} == gone
    split = update_need(COST, config, actor_config(ulysses_sequence_parallel_size=2), **arguments)
    assert split.passing["activations of 4 samples"] == before["activations of 4 samples"] / 2


@pytest.mark.parametrize("offload", [True, False])
def test_moments_that_come_for_the_step_are_beside_the_weights_and_gradients(tiny_model: Path, offload: bool) -> None:
    """Of a model whose activations are small; those that are always there are no more then."""
    cost = replace(COST, training_bytes=1.0)
    need = update_need(cost, model_config(tiny_model), actor_config(optimizer_offload=offload), world_size=1)
    moments = {name: size for name, size in (need.resident | need.passing).items() if name.startswith("AdamW")}
    assert sum(moments.values()) == 2 * 4 * cost.trained
    assert need.gib >= 4 * 4 * cost.trained / GIB


def test_the_sum_of_a_rollout_worker(tiny_model: Path) -> None:
    config = model_config(tiny_model, dtype="bfloat16")
    need = rollout_need(COST, config, vae=(GIB, 24 * GIB), samples=8)
    assert {name: size / GIB for name, size in (need.resident | need.passing).items()} == {
        "weights": 500,
        "VAE": 1,
        "activations of 8 samples": 24,  # decoding takes more than the 16 of the denoiser
    }


def run_config(tiny_model: Path, **trainer: Any) -> TrainConfig:
    rollout = {"n": 4, "micro_batch_size": 4, "pipeline": {"height": 16, "width": 24}}
    actor = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4}
    tree = {
        "data": {"train_batch_size": 4},
        "actor_rollout_ref": {"model": {"path": str(tiny_model)}, "rollout": rollout, "actor": actor},
        "trainer": {"device": "cuda", **trainer},
    }
    return TrainConfig.model_validate(tree)


def test_what_does_not_fit_is_refused_with_the_way_out(tiny_model: Path) -> None:
    model = model_config(tiny_model)
    with pytest.raises(
        DoesNotFit, match=r"the update needs 4340.0 GiB on each GPU \(AdamW 2000.0, .*\) but there are "
    ):
        check_fits(run_config(tiny_model, gpu_memory_gib=139.8), model, COST)
    with pytest.raises(DoesNotFit) as refused:
        check_fits(run_config(tiny_model, gpu_memory_gib=139.8), model, COST)
    assert "ppo_micro_batch_size_per_gpu" not in str(refused.value), "without any activations it does not fit either"
    with pytest.raises(DoesNotFit) as refused:
        check_fits(run_config(tiny_model, gpu_memory_gib=4310), model, COST)
    for way in (
        "lower actor.ppo_micro_batch_size_per_gpu, now 4",
        "actor.fsdp_config.gradient_checkpointing to true",
        "model.lora_rank",
        "train on 2 GPUs or more (trainer.n_gpus_per_node, now 1)",
    ):
        assert way in str(refused.value)
    check_fits(run_config(tiny_model, gpu_memory_gib=6000), model, COST)


def test_gathered_weights_that_stay_may_go(tiny_model: Path) -> None:
    model = model_config(tiny_model)
    for reshards in (True, False):
        kept = {"actor_rollout_ref": {"actor": {"fsdp_config": {"reshard_after_forward": reshards}}}}
        with pytest.raises(DoesNotFit) as refused:
            check_fits(run_config(tiny_model, gpu_memory_gib=4339).with_changes(kept), model, COST)
        assert ("set actor.fsdp_config.reshard_after_forward to true" in str(refused.value)) == (not reshards)


@pytest.mark.parametrize(
    ("there", "changes", "advised"),
    [
        (2600, {"trainer": {"n_gpus_per_node": 2}}, True),
        (900, {"actor_rollout_ref": {"actor": {"fsdp_config": {"param_offload": True}}}}, True),
        (2600, {}, False),  # a lone rank's part is all
        (2600, {"trainer": {"n_gpus_per_node": 2}, "actor_rollout_ref": {"model": {"lora_rank": 4}}}, False),
        (
            2500,
            {
                "trainer": {"n_gpus_per_node": 2},
                "actor_rollout_ref": {"actor": {"fsdp_config": {"shard_gradients": True}}},
            },
            False,
        ),
    ],
)
def test_gradients_of_all_weights_may_be_divided(
    tiny_model: Path, there: float, changes: dict[str, Any], advised: bool
) -> None:
    config = run_config(tiny_model, gpu_memory_gib=there, host_memory_gib=100).with_changes(
        {"data": {"train_batch_size": 8}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}}}
    )
    config = config.with_changes(changes)
    model = model_config(tiny_model, lora_rank=config.actor_rollout_ref.model.lora_rank)
    with pytest.raises(DoesNotFit) as refused:
        check_fits(config, model, COST)
    assert ("set actor.fsdp_config.shard_gradients to true" in str(refused.value)) == advised


def test_checkpoints_that_find_no_room_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, default_local_dir=tmp_path, total_training_steps=20, save_freq=10)
    with pytest.raises(DoesNotFit, match=r"takes 3000.0 GiB and 2 of them, at a time, 6000.0, but"):
        check_disk(config, COST)
    with pytest.raises(DoesNotFit, match=f"and 3 .* 9000.0, but {tmp_path}/.*set trainer.default_local_dir"):
        check_disk(config.with_changes({"trainer": {"save_freq": 5}}), COST)
    with pytest.raises(DoesNotFit, match=r"takes 3000.0 GiB, but .* has room for \d+\.\d: make some"):
        check_disk(config.with_changes({"trainer": {"save_freq": 0}}), COST)
    check_disk(config, replace(COST, trained=1000))


@pytest.mark.parametrize(
    ("algorithm", "ema", "ahead", "sets"),
    [
        ("flow_grpo", False, False, 0),
        ("flow_grpo", True, False, 1),
        ("flow_grpo", False, True, 1),
        ("diffusion_nft", False, False, 1),
        ("diffusion_nft", True, False, 2),
    ],
)
def test_a_checkpoint_has_every_set_of_weights_that_the_trainer_keeps(
    algorithm: str, ema: bool, ahead: bool, sets: int
) -> None:
    """Weights and two moments in fp32, and each the average, the old policy and the weights of before the update."""
    tree = {
        "algorithm": {"name": algorithm},
        "actor_rollout_ref": {"actor": {"ema": {"enable": ema}}},
        "trainer": {"one_step_off_policy": ahead},
    }
    assert checkpoint_bytes(TrainConfig.model_validate(tree), replace(COST, trained=1000)) == 4000 * (3 + sets)


@pytest.mark.parametrize(("share", "workers"), [(1.0, 1), (0.5, 2), (0.4, 2), (0.35, 2), (0.3, 3), (0.75, 1)])
def test_a_gpu_holds_as_many_workers_as_have_their_whole_share_of_it(share: float, workers: int) -> None:
    rollout = {"num_actors": 4, "num_gpus_per_actor": share}
    assert samplers_on_a_gpu(TrainConfig.model_validate({"actor_rollout_ref": {"rollout": rollout}})) == workers
    alone = {"num_actors": 1, "num_gpus_per_actor": share}  # and leaves the rest to a reward
    assert samplers_on_a_gpu(TrainConfig.model_validate({"actor_rollout_ref": {"rollout": alone}})) == 1


def test_the_checkpoints_that_are_there_are_room_for_the_next(tiny_model: Path, small_disk: Path) -> None:
    stored = {"total_training_steps": 40, "save_freq": 10, "keep_stages": False}
    config = run_config(tiny_model, default_local_dir=small_disk, **stored)
    cost = replace(COST, trained=2**20 // 12 // 4)  # a quarter of the disk
    check_disk(config, cost)
    (folder := config.run_dir / "checkpoints/iter_000020").mkdir(parents=True)
    (folder / "file").write_bytes(bytes(2**19))
    check_disk(config, cost)
    (small_disk / "another's").write_bytes(bytes(2**18 + 2**17))
    with pytest.raises(DoesNotFit):
        check_disk(config, cost)


@pytest.mark.parametrize(
    ("save_freq", "changes", "number"),
    [
        (0, {}, 1000),
        (400, {}, 400),
        (400, {"one_step_off_policy": True}, 401),
        (1, {}, None),
        (0, {"keep_stages": False}, None),
        (0, {"total_training_steps": 1}, None),
    ],
)
def test_rollouts_that_are_kept_until_a_late_checkpoint_find_room_or_the_run_is_refused(
    tiny_model: Path, small_disk: Path, save_freq: int, changes: dict[str, Any], number: int | None
) -> None:
    stored = {"total_training_steps": 1000, "save_freq": save_freq} | changes
    config = run_config(tiny_model, default_local_dir=small_disk, **stored, device="cpu")
    cost = replace(COST, trained=1000)
    if number is None:
        check_disk(config, cost)
        return
    said = rf"keep_stages keeps .*, with trainer.save_freq {save_freq}.* for {number} of them, "
    with pytest.raises(DoesNotFit, match=rf"{said}.*{small_disk}/.*/stages has room"):
        check_disk(config, cost)


def test_the_rollouts_that_are_there_are_room_for_those_that_a_resumed_run_keeps(
    tiny_model: Path, small_disk: Path
) -> None:
    """And those of iterations that a checkpoint has are not kept again."""
    config = run_config(tiny_model, default_local_dir=small_disk, total_training_steps=1000, save_freq=0)
    cost, each = replace(COST, trained=1000), kept_rollout_bytes(config)
    (config.run_dir / "checkpoints/iter_000998").mkdir(parents=True)
    check_disk(config, cost)
    (folder := config.run_dir / "stages/rollout/iter_000999").mkdir(parents=True)
    (folder / "file").write_bytes(bytes(each))
    (small_disk / "another's").write_bytes(bytes(2**20 - 3 * each))
    check_disk(config, cost)
    (folder / "file").rename(small_disk / "another's, too")
    with pytest.raises(DoesNotFit, match="for 2 of them"):
        check_disk(config, cost)


@pytest.mark.parametrize(
    ("algorithm", "outputs", "recorded"),
    [
        ("flow_grpo", {PICTURES}, {"window": (0, 1, 2)}),
        ("flow_grpo", {LATENTS, PICTURES}, {"window": (0, 1, 2)}),
        ("diffusion_nft", {LATENTS}, {"window": (), "record_finished": True}),
    ],
)
def test_a_kept_rollout_takes_what_was_counted_and_its_prompts(
    tiny_model: Path, tmp_path: Path, algorithm: str, outputs: set[str], recorded: dict[str, Any]
) -> None:
    rewards = {PICTURES: "brightness", LATENTS: f"{__name__}:of_latents"}
    changes = {
        "algorithm": {"name": algorithm},
        "actor_rollout_ref": {"rollout": {"pipeline": {"num_inference_steps": 4}}},
        "reward": {"functions": {f"of_{kind}": {"reward": rewards[kind]} for kind in outputs}},
    }
    config = run_config(tiny_model, total_training_steps=1).with_changes(changes)
    request = replace(rollout_request(4, (5, 3, 4, 2), **recorded), outputs=frozenset(outputs))
    made = DiffusersRolloutEngine(model_config(tiny_model)).produce(request)
    assert made.recorded is not None
    pictures, latents = (None if tensor is None else tensor.numpy() for tensor in (made.pictures, made.latents))
    write_batch(tmp_path / "batch", made.recorded, pictures, latents, made.finite.numpy())
    samples, written = read_samples(tmp_path / "batch")
    assert isinstance(samples, Trajectories | FinishedLatents)
    assert kept_rollout_bytes(config) == sum(t.nbytes for t in (samples.latents, *(written[kind] for kind in outputs)))


def of_latents(batch: Any, prompts: Any) -> Any:
    """A reward that is never asked."""


of_latents.wants = "latents"  # type: ignore[attr-defined]


@pytest.mark.slow  # all sixty blocks; the sentence and a measured size are quick: the tests above
@pytest.mark.parametrize(("recipe", "gib"), [("qwen-image-ocr-flow-grpo", 311.2)])
def test_a_recipe_that_one_gpu_cannot_hold_says_so_in_numbers(recipe: str, gib: float, tmp_path: Path) -> None:
    """All weights of Qwen-Image on one H200: 20.43e9 of them with gradients and AdamW's moments, in fp32."""
    machine = json.loads((ROOT / "machines" / "one_h200.json").read_text())
    config = load_recipe(recipe, ROOT / "prefect.yaml").with_changes(machine)
    config = config.with_changes({"trainer": {"gpu_memory_gib": 139.8}})
    settings, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    write_configs("qwen-image", tmp_path)
    trained = settings.model.model_copy(update={"path": str(tmp_path)})
    model = DiffusionModelConfig.load(trained, settings.rollout.pipeline, settings.rollout.algo)
    prompts = embeddings_of(model, lengths=(256,)).to("meta")
    prompts = replace(prompts, prompt_embeds_mask=torch.ones(1, 256, dtype=torch.bool))
    cost = pass_cost(model, prompts, actor.rows_of_pass, checkpointing=True)
    others = "train LoRA with model.lora_rank, or train on 3 GPUs or more (trainer.n_gpus_per_node, now 1)"
    offload = "set actor.fsdp_config.param_offload to true"
    too_much = "actor.fsdp_config.param_offload would keep 304.4 GiB in the machine's memory, which has 128.0"
    for host, ways in (
        (128, f"{others}; {too_much}"),
        (400, f"{offload} and set trainer.async_checkpoint to false, or {others}"),
        (600, f"{offload}, or {others}"),
    ):
        with pytest.raises(DoesNotFit) as refused:
            check_fits(config.with_changes({"trainer": {"host_memory_gib": host}}), model, cost)
        assert str(refused.value) == (
            f"the update needs {gib} GiB on each GPU (AdamW 152.2, gradients 77.5, weights 76.1, activations of 8 "
            f"samples 4.0, gathered weights 1.3) but there are 139.8: {ways}"
        )
    offloads = {"actor_rollout_ref": {"actor": {"fsdp_config": {"param_offload": True}}}}
    offloads |= {"trainer": {"host_memory_gib": 128}}
    offloaded = config.with_changes({"actor_rollout_ref": {"rollout": {"enable_sleep_mode": True}}})
    offloaded = offloaded.with_changes(offloads)
    with pytest.raises(DoesNotFit) as refused:
        check_host(offloaded, needs(offloaded, model, cost))
    assert str(refused.value) == (
        "the run keeps 533.0 GiB in its machine's memory (the checkpoint's copy 228.3, offloaded weights 152.2, "
        "offloaded AdamW 152.2, the rollout's weights, asleep 0.2) but there are 128.0: train LoRA with "
        "model.lora_rank, or train on 5 machines or more (trainer.nnodes, now 1)"
    )


def test_text_encoders_on_the_trainers_gpu_are_counted(tiny_model: Path) -> None:
    """Asleep but while they encode, beside what stays on the GPU; awake, beside the update. Not those elsewhere."""

    def asked(*, rollout: str = "separate", **encoder: Any) -> TrainConfig:
        data = {"embeddings": "live", "text_encoder": {"device": "cuda", "placement": "colocated"} | encoder}
        policy = {"rollout": {"placement": rollout, "pipeline": {"max_sequence_length": 24}}}
        return run_config(tiny_model).with_changes({"data": data, "actor_rollout_ref": policy})

    weights = sum(p.numel() for p in AutoModel.from_pretrained(tiny_model / "text_encoder").parameters())
    assert colocated_encoders(asked()) == pytest.approx(4 * weights, rel=0.2), "its head for words is in the file, too"
    assert colocated_encoders(asked(dtype="bfloat16")) == colocated_encoders(asked()) / 2
    assert colocated_encoders(asked(placement="separate")) == 0
    update, sampling = Need({"weights": 10 * GIB}, {"activations": 5 * GIB}), Need({"weights": 4 * GIB}, {})
    model = Model(model_config(tiny_model), COST)
    small, large = Needs(update, sampling, model, 3 * GIB), Needs(update, sampling, model, 6 * GIB)
    assert shortfall(asked(), small, there=15.0) is None
    said = "encoding prompts needs 16.0 GiB on the first GPU (weights 10.0, text encoders 6.0) but there are 15.0: "
    assert str(shortfall(asked(), large, there=15.0)).startswith(said)
    assert shortfall(asked(), large, there=16.0) is None
    assert "needs 20.0 GiB on the first GPU" in str(shortfall(asked(rollout="colocated"), large, there=16.0))
    awake = asked(enable_sleep_mode=False)
    assert "the update needs 18.0 GiB on each GPU (weights 10.0" in str(shortfall(awake, small, there=15.0))
    assert shortfall(awake, small, there=18.0) is None


def test_the_rollout_must_fit_too(tiny_model: Path) -> None:
    """Alone on its GPU, several on one, and beside the trainer's weights."""
    model, large = model_config(tiny_model), replace(COST, trained=0, training_bytes=0, blocks=(0, 0), parameters=GIB)
    check_fits(run_config(tiny_model, gpu_memory_gib=13), model, large)
    with pytest.raises(DoesNotFit, match=r"rollout needs 12.0 GiB .* lower rollout.micro_batch_size, now 4"):
        check_fits(run_config(tiny_model, gpu_memory_gib=11.9), model, large)
    shared = run_config(tiny_model, gpu_memory_gib=13).with_changes(
        {"actor_rollout_ref": {"rollout": {"num_actors": 2, "num_gpus_per_actor": 0.5}}}
    )
    with pytest.raises(DoesNotFit, match=r"rollout needs 24.0 GiB .* or raise rollout.num_gpus_per_actor"):
        check_fits(shared, model, large)
    colocated = run_config(tiny_model, gpu_memory_gib=13).with_changes(
        {"actor_rollout_ref": {"rollout": {"placement": "colocated"}}}
    )
    with pytest.raises(DoesNotFit, match=r"needs 16.0 GiB on each GPU beside the trainer's weights .* separate"):
        check_fits(colocated, model, replace(large, frozen=GIB))


def test_nothing_is_checked_where_nothing_is_known(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_config(tiny_model)
    check_fits(run_config(tiny_model, device="cpu", gpu_memory_gib=1), model, COST)
    assert not caplog.records
    if not torch.cuda.is_available():
        check_fits(run_config(tiny_model), model, COST)
        assert "trainer.gpu_memory_gib is null: whether the run fits is not checked" in caplog.text


def test_other_programs_are_told_of_where_the_run_does_not_fit_beside_them(tiny_model: Path) -> None:
    config, model = run_config(tiny_model, gpu_memory_gib=80), model_config(tiny_model)
    needed = check_fits(config, model, replace(COST, trained=0, blocks=(0, 0), parameters=GIB))
    assert needed is not None
    assert needed.update.gib == 40
    for used in (0.0, 0.5, 40.0):
        assert beside_others(config, needed, InUse(3, used), there=80.0) is None
    assert beside_others(config, needed, InUse(3, 60.4), there=80.0) == (
        "other programs have 60.4 GiB of GPU 3 in use, of 80.0, and the update needs 40.0 GiB on each GPU (activations "
        "of 4 samples 40.0) but there are 19.6: lower actor.ppo_micro_batch_size_per_gpu, now 4, or set "
        "actor.fsdp_config.gradient_checkpointing to true, or train LoRA with model.lora_rank, or set model.dtype to "
        "bfloat16; or end them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
    )
    sampling = needed._replace(update=Need({}, {}))
    assert "the rollout needs 12.0 GiB" in str(beside_others(config, sampling, InUse(0, 70.0), there=80.0))
    assert "but there are 0.0" in str(beside_others(config, needed, InUse(0, 81.0), there=80.0))


def test_what_is_in_use_of_a_gpu_that_nvml_does_not_know_is_unknown(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here that is any, where the machine has no NVIDIA driver: a word for who debugs, and no warning."""
    with caplog.at_level(logging.DEBUG, "tasks.system.gpu_memory"):
        assert gpu_memory_in_use(["00000000-0000-0000-0000-000000000000"]) == []
    assert "memory is in use: NVML says" in caplog.text
    caplog.clear()
    if not torch.cuda.is_available():
        nothing, model = Need({}, {}), Model(model_config(tiny_model), COST)
        warn_of_others(run_config(tiny_model), Needs(nothing, nothing, model))
        all_of_it = Needs(nothing.with_resident("all", 1e15), nothing, model)
        warn_of_others(run_config(tiny_model, gpu_memory_gib=80), all_of_it)
        assert not caplog.records


class Actor:
    """What a group's actor is to the decorator."""

    @measures_gpu_memory("load")
    def __init__(self) -> None:
        self.calls: list[int] = []

    @measures_gpu_memory(lambda number: "odd" if number % 2 else "even")
    def work(self, number: int) -> int:
        """Adds up."""
        self.calls.append(number)
        return sum(self.calls)


def test_a_process_without_cuda_measures_nothing() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("this process has used CUDA")
    actor = Actor()
    assert [actor.work(1), actor.work(2)] == [1, 3]
    assert Actor.work.__doc__ == "Adds up."
    assert peaks_since_last_time(actor) == {}


def test_a_stage_has_the_peak_of_the_actor_that_took_most() -> None:
    first = {"gen": GpuPeak(GIB, 5 * GIB), "load": GpuPeak(3 * GIB, 3 * GIB)}
    assert peak_metrics("rollout", [first, {"gen": GpuPeak(2 * GIB, 4 * GIB)}, {}]) == {
        "memory/rollout/gpu_peak_gib/gen": 2.0,
        "memory/rollout/gpu_kept_gib/gen": 5.0,
        "memory/rollout/gpu_peak_gib/load": 3.0,
        "memory/rollout/gpu_kept_gib/load": 3.0,
    }


class Allocator:
    """What torch.cuda says of one whose tensors take and leave bytes, and who gives none back."""

    def __init__(self) -> None:
        self.kept = self.most_kept = self.most_taken = 0

    def take(self, size: int) -> None:
        """A tensor comes and goes."""
        self.kept = max(self.kept, size)
        self.most_kept, self.most_taken = max(self.most_kept, self.kept), max(self.most_taken, size)

    def reset(self) -> None:
        """The peaks begin anew, at what there is: no tensor, and what is kept."""
        self.most_kept, self.most_taken = self.kept, 0


def test_a_stage_is_measured_by_what_its_tensors_take_and_by_what_the_allocator_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Allocator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", cuda.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: cuda.most_taken)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: cuda.most_kept)
    actor = Actor()
    assert peaks_since_last_time(actor) == {}, "of a process that has nothing on a GPU"
    actor.calls = Taking(cuda)
    actor.work(3)
    actor.work(8)
    actor.work(1)
    actor.work(2)
    assert peaks_since_last_time(actor) == {"odd": GpuPeak(3, 8), "even": GpuPeak(8, 8)}
    assert peaks_since_last_time(actor) == {}


class Taking(list):
    """An actor's calls, each of which takes so many bytes of a GPU."""

    def __init__(self, cuda: Allocator) -> None:
        super().__init__()
        self.cuda = cuda

    def append(self, size: int) -> None:
        """One more."""
        self.cuda.take(size)
        super().append(size)


def test_update_and_rollout_must_fit_together_where_the_rollout_does_not_sleep(tiny_model: Path) -> None:
    model = model_config(tiny_model)
    large = replace(COST, trained=0, training_bytes=8 * GIB, blocks=(0, 0), parameters=GIB)
    rollout = {"placement": "colocated"}
    sleeps = run_config(tiny_model, gpu_memory_gib=13).with_changes({"actor_rollout_ref": {"rollout": rollout}})
    check_fits(sleeps, model, large)
    awake = sleeps.with_changes({"actor_rollout_ref": {"rollout": {"enable_sleep_mode": False}}})
    with pytest.raises(DoesNotFit, match=r"need 20.0 GiB together on each GPU .*rollout.enable_sleep_mode is false"):
        check_fits(awake, model, large)
    check_fits(awake.with_changes({"trainer": {"gpu_memory_gib": 1000}}), model, large)
    check_fits(awake.with_changes({"actor_rollout_ref": {"rollout": {"placement": "separate"}}}), model, large)
