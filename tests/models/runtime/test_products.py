# SPDX-License-Identifier: Apache-2.0
"""LoRA's fused projections and float8 matrices: the same numbers on both sides, and LoRA's gradients as they were."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.config.model import ModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.runtime import float8
from models.runtime.float8 import Float8Linear, rounded
from models.runtime.projections import project
from models.samples.trajectories import NoiseKey, RolloutRequest, Trajectories
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.trainable import trainable
from tests.support.helpers import actor_config, model_config, noise_keys
from tests.support.tiny_models import FAMILIES, embeddings_of

ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5])
SAMPLES = 4


def lora_layers(targets: tuple[bool, bool, bool], width: int = 16) -> list[Any]:
    """Three linear layers in fp64, some with LoRA that is not zero."""
    torch.manual_seed(0)
    layers: list[Any] = []
    for adapted in targets:
        base: Any = nn.Linear(width, width, dtype=torch.float64).requires_grad_(False)
        if adapted:
            base = LoraLinear(base, "default", LoraConfig(), r=4, lora_alpha=8).double()
            nn.init.normal_(base.lora_B["default"].weight)
        layers.append(base)
    return layers


def outcome(compute: Callable[[Tensor], list[Tensor]], layers: list[Any], given: Tensor) -> list[Tensor]:
    """The outputs, and the gradients of what was given and of every trained weight."""
    tensor = given.clone().requires_grad_()
    outputs = compute(tensor)
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    return [*outputs, *torch.autograd.grad(sum(o.sin().sum() for o in outputs), [tensor, *trained])]  # type: ignore


@pytest.mark.parametrize("targets", [(True, True, True), (True, False, True), (False, False, False)])
@pytest.mark.parametrize("disabled", [False, True])
def test_projected_together_is_projected_one_by_one(targets: tuple[bool, bool, bool], disabled: bool) -> None:
    """In fp64, outputs and gradients; with LoRA on every layer, on some, on none, and switched off."""
    layers, given = lora_layers(targets), torch.randn(2, 5, 16, dtype=torch.float64)
    for layer in layers:
        if disabled and hasattr(layer, "enable_adapters"):
            layer.enable_adapters(False)
            layer.requires_grad_(False)
    together = outcome(lambda tensor: project(layers, tensor), layers, given)
    apart = outcome(lambda tensor: [layer(tensor) for layer in layers], layers, given)
    assert len(together) == 4 + (0 if disabled else 2 * sum(targets))
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gradient", [False, True])
def test_a_float8_product_is_near_the_exact_one(gradient: bool) -> None:
    """3 mantissa bits: each factor within 1/16 of itself, and sums of many products far nearer."""
    torch.manual_seed(0)
    given, matrix, bias = torch.randn(2, 24, 64), torch.randn(48, 64), torch.randn(48)
    given[0, 0] *= 1e4  # a row that would leave nothing of the others under one scale for all
    given[0, 1] = 0.0
    layer = Float8Linear(linear_of(matrix, bias), gradient)
    tensor = given.clone().requires_grad_()
    output = layer(tensor)
    seed = torch.randn_like(output)
    (backward,) = torch.autograd.grad(output, tensor, seed)
    exact, exact_backward = given.double() @ matrix.T.double() + bias, seed.double() @ matrix.double()
    assert relative(output[0, :1], exact[0, :1]) < 0.05
    assert relative(output[1], exact[1]) < 0.05
    assert torch.equal(output[0, 1].detach(), bias)
    # Against the matrix that it computes with, the gradient in the model's format is exact.
    held = layer.weight.double() * layer.scale
    assert relative(backward, seed.double() @ held) < (0.05 if gradient else 1e-6)
    assert relative(backward, exact_backward) < 0.06


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*arguments, **(named or {}))


def test_only_loras_input_is_multiplied_at_once() -> None:
    """Three frozen products and three of B's stay; A's three are one, and so are two of two layers."""
    counted = []
    for targets in ((True, True, True), (True, False, True), (False, False, False)):
        layers, given = lora_layers(targets), torch.randn(5, 16, dtype=torch.float64)
        with Products() as together:
            project(layers, given)
        with Products() as apart:
            [layer(given) for layer in layers]
        counted.append((apart.count, together.count))
    assert counted == [(9, 7), (7, 6), (3, 3)]


def test_rounding_spans_the_whole_format() -> None:
    values, scale = rounded(torch.tensor([[1e-30, 0.0], [-448.0, 1.0], [7e30, 3.0]]))
    assert values.float()[1].tolist() == [-448.0, 1.0]
    assert scale.flatten().tolist() == pytest.approx([1e-12 / 448, 1.0, 7e30 / 448])
    assert values.float().isfinite().all()
    assert values.float()[2, 0] == 448.0


def test_a_rows_largest_number_is_never_beyond_the_format() -> None:
    """Rounded, their quotients may be a bit more than 448, from whatever number they begin."""
    generator = torch.Generator().manual_seed(0)
    powers = 2.0 ** torch.randint(-30, 120, (100_000, 1), generator=generator)
    rows = torch.randn(100_000, 4, generator=generator) * powers
    values, scale = rounded(rows)
    assert torch.equal(values.float().abs().amax(1), torch.full((100_000,), 448.0))
    assert ((values.double() * scale - rows).abs() <= rows.abs() / 16 + scale * 2**-10).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_stays_so(value: float) -> None:
    values, scale = rounded(torch.tensor([[1.0, value], [1.0, 2.0]]))
    made = values.float() * scale
    assert made[0].isnan().all()
    assert made[1].isfinite().all()


def linear_of(matrix: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(matrix.shape[1], matrix.shape[0])
    linear.weight.data, linear.bias.data = matrix.clone(), bias.clone()
    return linear.requires_grad_(False)


def relative(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor.detach().double() - exact.detach()).norm() / exact.norm())


# ---- in the engines


def request_of(family: str, config: Any) -> RolloutRequest:
    """The same at each call: its embeddings are drawn from torch's own generator."""
    torch.manual_seed(0)
    prompts = embeddings_of(config, (5, 3), negative_length=4)
    keys: tuple[NoiseKey, ...] = noise_keys(2, 2)
    return RolloutRequest(keys, prompts, torch.tensor([0, 0, 1, 1]), (0, 1), record_unconditional=True)


def config_of(family: str, folder: Path, **products: Any) -> Any:
    guided = FAMILIES[family].guided
    return model_config(folder, lora_rank=4, lora_alpha=8, **guided, **({"dtype": "bfloat16"} | products))


def trained(
    config: Any, request: RolloutRequest, **settings: Any
) -> tuple[DiffusersFSDPEngine, dict[str, float], dict[str, Tensor]]:
    """A trainer after one update of a rollout's samples, both from the same LoRA weights, none of which is zero; its
    metrics and what the update gave each weight."""
    engine = DiffusersFSDPEngine(config, actor_config(use_kl_loss=True, kl_loss_coef=0.1, clip_grad=1e9, **settings))
    engine.initialize()
    for number, shard in enumerate(trainable(engine.module).values()):
        local: Any = shard.to_local() if hasattr(shard, "to_local") else shard  # type: ignore[operator]
        generator = torch.Generator().manual_seed(number)
        local.data.add_(0.05 * torch.randn(local.shape, generator=generator))
    rollout = DiffusersRolloutEngine(config)
    before = engine.gather_weights()
    rollout.load_weights(before)
    samples = rollout.produce(request).recorded
    assert isinstance(samples, Trajectories)
    gradients: dict[str, Tensor] = {}

    def note(*_: Any) -> None:
        for name, shard in trainable(engine.module).items():
            given: Any = torch.zeros_like(shard) if shard.grad is None else shard.grad
            gradients[name] = given.to_local().clone() if hasattr(given, "to_local") else given.clone()

    engine.optimizer.register_step_pre_hook(note)
    batch = ActorBatch([(replace(samples, unconditional=None), ADVANTAGES)], SAMPLES)
    return engine, engine.update_policy([batch]), gradients


@pytest.mark.parametrize("family", ["stable_diffusion_3", "qwen_image"])
@pytest.mark.usefixtures("one_rank")
def test_an_update_with_fused_projections_is_the_same_update(family: str, tiny_folder: Callable[[str], Path]) -> None:
    """In fp32 to its rounding; the names that travel are the same."""
    folder = tiny_folder(family)
    request = request_of(family, config_of(family, folder))
    (plain, plain_metrics, expected), (fused, metrics, found) = (
        trained(config_of(family, folder, dtype="float32", fuse_projections=fuse), request) for fuse in (False, True)
    )
    assert type(fused.module.transformer_blocks[0].attn.processor).__name__.startswith("Fused")  # type: ignore
    assert list(fused.gather_weights()) == list(plain.gather_weights())
    assert metrics["logprob_abs_diff/max"] == plain_metrics["logprob_abs_diff/max"] == 0.0
    assert metrics["kl_loss"] == pytest.approx(plain_metrics["kl_loss"], rel=1e-3)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6 + 1e-4 * float(gradient.abs().max()))


InBf16 = Callable[[str], tuple[RolloutRequest, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def in_bf16(one_rank: None, tiny_folder: Callable[[str], Path]) -> InBf16:
    """Name of a family -> a request, and what an update of its samples with plain matrices gives each weight."""

    @cache
    def computed(family: str) -> tuple[RolloutRequest, dict[str, Tensor]]:
        config = config_of(family, tiny_folder(family))
        request = request_of(family, config)
        return request, trained(config, request)[2]

    return computed


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("frozen", ["float8_forward", "float8"])
@pytest.mark.parametrize("family", ["stable_diffusion_3", "qwen_image"])
def test_float8_reaches_every_lora_matrix(
    family: str, frozen: str, fuse: bool, tiny_folder: Callable[[str], Path], in_bf16: InBf16
) -> None:
    """In bf16: the update finds the rollout's log-probs, and its gradients point where those in bf16 do."""
    request, expected = in_bf16(family)
    config = config_of(family, tiny_folder(family), frozen_dtype=frozen, fuse_projections=fuse)
    engine, metrics, found = trained(config, request)
    assert metrics["logprob_abs_diff/max"] == 0.0
    assert found.keys() == expected.keys()
    dead = FAMILIES[family].dead_ends
    for name, gradient in found.items():
        assert gradient.isfinite().all()
        assert any(part in name for part in dead) or gradient.any(), name
    one, other = (torch.cat([g.flatten() for g in gradients.values()]) for gradients in (found, expected))
    assert torch.cosine_similarity(one, other, dim=0) > 0.5
    halves = [layer for layer in engine.module.modules() if isinstance(layer, Float8Linear)]
    assert halves
    assert all(layer.weight.dtype == torch.float8_e4m3fn and not hasattr(layer.weight, "to_local") for layer in halves)
    assert (
        engine.module.transformer_blocks[0]
        .get_submodule(  # type: ignore[union-attr, operator]
            "norm1.linear" if family == "stable_diffusion_3" else "img_mod.1"
        )
        .weight.dtype
        == torch.bfloat16
    )


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_a_trainer_that_computes_fp32_weights_in_bf16_multiplies_by_fp32_scales(
    fuse: bool, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP casts what has the model's own format, as the scales have then; a GPU's product refuses them in bf16."""
    scaled, formats = float8._scaled, set()

    def noted(values: Tensor, rows: Tensor, weight: Tensor, columns: Tensor, *rest: Any) -> Tensor:
        formats.add((rest[-1], columns.dtype))
        return scaled(values, rows, weight, columns, *rest)

    monkeypatch.setattr(float8, "_scaled", noted)
    config = config_of(
        "qwen_image", tiny_folder("qwen_image"), dtype="float32", frozen_dtype="float8", fuse_projections=fuse
    )
    engine, _, found = trained(config, request_of("qwen_image", config), param_dtype="bfloat16")
    in_trainer = {scales for activations, scales in formats if activations == torch.bfloat16}
    assert in_trainer == {torch.float32}
    assert all(gradient.isfinite().all() for gradient in found.values())
    layers = [layer for layer in engine.module.modules() if isinstance(layer, Float8Linear)]
    assert layers
    assert not any(hasattr(layer.scale, "to_local") for layer in layers), "whole on every rank, as the matrix is"


def test_there_is_nothing_to_fuse_without_lora() -> None:
    with pytest.raises(ValidationError, match=r"fuse_projections is true, but lora_rank is 0.*set lora_rank"):
        ModelConfig(fuse_projections=True)


def test_full_weights_are_not_kept_in_float8() -> None:
    with pytest.raises(ValidationError, match=r"frozen_dtype is float8, but lora_rank is 0.*set lora_rank"):
        ModelConfig(frozen_dtype="float8")
