# SPDX-License-Identifier: Apache-2.0
"""The first ratio of every update is exactly 1 on a GPU: real widths, few layers, bf16, compiled.

Skipped without CUDA, but for tiny models that are not compiled, so that a machine without a GPU runs the same body. On
a GPU machine: `python -m pytest tests/gpu/test_zero_difference.py`, about a minute, most of it compilation. It needs
nothing of the upper floors.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.iteration import advantages_of, move_off_zero, request_of
from benchmarks.log_prob_distance import SIZES, sync
from benchmarks.real_size import use_random_weights, write_configs
from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest, Trajectories
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.canary import Canary, check_canary
from models.weights.digests import check_digests, digests_of
from models.weights.trainable import kept_in_fp32, trainable
from tests.support.helpers import actor_config, model_config, noise_keys
from tests.support.tiny_models import FAMILIES, embeddings_of

HERE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(HERE == "cpu", reason="needs a CUDA device; there is none here")
BATCH = 4
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd3.5-medium": ("stable_diffusion_3", {"num_layers": 2, "dual_attention_layers": [0]}),
    "qwen-image": ("qwen_image", {"num_layers": 2}),
    "flux.1-dev": ("flux", {"num_layers": 2, "num_single_layers": 2}),
    "flux.2-klein-base-4b": ("flux_2_klein", {"num_layers": 2, "num_single_layers": 2}),
}
"""A published model -> its tiny family, and what makes it small enough to compile in a test."""
LORA: dict[str, Any] = {"lora_rank": 16, "lora_alpha": 32}
FLOAT8 = LORA | {"fuse_projections": True, "frozen_dtype": "float8"}


def kind_of(weights: dict[str, Any]) -> str:
    """What a case is called."""
    return "float8" if "frozen_dtype" in weights else "lora" if weights else "full"


# FLUX eager with all weights: the backward pass of cuDNN's attention failed there without a compiler too. It is last,
# because an illegal memory access ends every later test of the process.
CASES = [
    ("sd3.5-medium", LORA, True, 1),
    ("sd3.5-medium", LORA, True, 2),
    ("sd3.5-medium", FLOAT8, True, 1),
    ("sd3.5-medium", {}, True, 1),
    ("qwen-image", LORA, True, 1),
    ("flux.2-klein-base-4b", LORA, True, 1),
    ("flux.1-dev", LORA, True, 1),
    ("flux.1-dev", {}, False, 1),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank_here() -> Iterator[None]:
    """torch.distributed with this process as its only rank."""
    settings: dict[str, Any] = {"device_id": torch.device("cuda:0")} if HERE == "cuda" else {}
    backend = "nccl" if HERE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **settings)
    yield
    dist.destroy_process_group()


def engines(config: DiffusionModelConfig, **settings: Any) -> tuple[DiffusersRolloutEngine, DiffusersFSDPEngine]:
    """Both with the same weights, of which none is at its start."""
    chosen = {"lr": 1e-4, "ppo_micro_batch_size_per_gpu": BATCH} | settings
    trainer = DiffusersFSDPEngine(config, actor_config(**chosen), HERE)
    trainer.initialize()
    move_off_zero(trainer)
    rollout = DiffusersRolloutEngine(config, HERE)
    sync(trainer, rollout)
    return rollout, trainer


def check_sync(rollout: DiffusersRolloutEngine, trainer: DiffusersFSDPEngine, canary: Canary) -> None:
    """The digests are of equal bits, computed on the GPU and on the CPU; and the canary's velocity is the same."""
    formats = (torch.float32, torch.bfloat16)
    held = digests_of(rollout.held_weights())
    assert held
    check_digests(digests_of(dict(trainer.whole_weights()), *formats), held, 1)
    check_digests(digests_of(trainer.gather_weights(), *formats), held, 1)
    assert check_canary(trainer.canary_velocity(canary), rollout.canary_velocity(canary), 1, tolerance=0.0) == 0.0


@pytest.mark.parametrize("guided", [False, True])
def test_what_diffusers_keeps_in_fp32_stays_so_under_fsdp(tiny_folder: Callable[[str], Path], guided: bool) -> None:
    """Wan's norms, time embedder and tables: whole and in fp32 on both sides, and trained."""
    family = FAMILIES["wan"]
    settings = family.guided if guided else family.plain
    config = model_config(tiny_folder("wan"), dtype="bfloat16", height=32, width=64, **settings)
    rollout, trainer = engines(config, clip_grad=0.1)
    kept = kept_in_fp32(trainer.module) & trainable(trainer.module).keys()
    assert kept
    for module in (trainer.module, rollout.transformer):
        parts = {name: p for name, p in trainable(module).items() if name in kept}
        assert {p.dtype for p in parts.values()} == {torch.float32}
        assert {p.device.type for p in parts.values()} == {HERE}
        assert not any(isinstance(p, DTensor) for p in parts.values())
    prompts = embeddings_of(config, lengths=(5, 3), negative_length=4 if guided else None)
    check_sync(rollout, trainer, Canary(prompts))
    request = replace(request_like(prompts), outputs=frozenset())
    trajectories = rollout.produce(request).recorded
    assert isinstance(trajectories, Trajectories)
    before: dict[str, Tensor] = {name: p.detach().clone() for name, p in trainable(trainer.module).items()}
    first = trainer.update_policy([ActorBatch([(trajectories, advantages_of(BATCH))], BATCH)])
    assert first["logprob_abs_diff/max"] == 0.0
    moved = {name for name, p in trainable(trainer.module).items() if not torch.equal(p, before[name])}
    assert kept <= moved


def request_like(prompts: PromptTable) -> RolloutRequest:
    """Two samples of each prompt."""

    return RolloutRequest(noise_keys(2, 2), prompts, torch.arange(2).repeat_interleave(2), (0, 1))


@pytest.mark.slow  # on a CPU the families' conformance tests hold nearly the same
@pytest.mark.parametrize(
    ("name", "weights", "compiled", "together"),
    CASES,
    ids=[f"{name}-{kind_of(weights)}-{compiled}-{together}" for name, weights, compiled, together in CASES],
)
def test_the_first_ratio_is_exactly_one(
    name: str,
    weights: dict[str, Any],
    compiled: bool,
    together: int,
    tiny_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With guidance and without, there with a reward missing; the trainer's rescoring gives the rollout's own bits.

    Also where a pass has `together` steps of a part of the samples, as many rows as were sampled at a time.
    """
    family, layers = LAYERS[name]
    adapter, size = FAMILIES[family].adapter, SIZES[name]
    picture: dict[str, Any] = {"height": 16, "width": 24}
    if HERE == "cpu":
        folder = tiny_folder(family)
    else:
        folder = tmp_path / "model"
        write_configs(name, folder)
        file = folder / "transformer" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | layers))
        for loader in ("load_transformer", "load_vae"):  # for monkeypatch to give back
            monkeypatch.setattr(adapter, loader, getattr(adapter, loader))
        use_random_weights(adapter, HERE)
        monkeypatch.setattr("models.rollout.diffusers.compile_decoder", lambda vae: None)
        picture = {"height": 512, "width": 512, "compile": compiled}

    def config_of(guidance: dict[str, float]) -> DiffusionModelConfig:
        return model_config(folder, dtype="bfloat16", noise_level=size.noise_level, **picture, **weights, **guidance)

    torch._dynamo.reset()
    guided, plain = config_of(size.guidance), config_of(size.plain)
    shared = {"levels_per_pass": together, "ppo_micro_batch_size_per_gpu": BATCH // together}
    rollout, trainer = engines(guided, guidance_gradient="conditional", clip_ratio=size.clip, **shared)
    tokens = size.text_tokens if HERE == "cuda" else 8
    for config in (guided, plain):
        rollout.model_config = trainer.model_config = config
        request = request_of(config, tokens, (0, 1), BATCH, record=config is guided, iteration=0)
        canary = Canary(request.prompts, rows=BATCH)
        check_sync(rollout, trainer, canary)
        trajectories = rollout.produce(replace(request, outputs=frozenset())).recorded
        assert isinstance(trajectories, Trajectories)
        own = trainer.rescored(replace(trajectories, unconditional=None)).log_probs
        assert torch.equal(own, trajectories.log_probs)
        advantages = advantages_of(BATCH)
        if config is plain:
            advantages[1] = float("nan")
        first = trainer.update_policy([ActorBatch([(trajectories, advantages)], int((~advantages.isnan()).sum()))])
        assert first["logprob_abs_diff/max"] == first["ratio_deviation/max"] == first["pg_clipfrac"] == 0.0
        assert first["grad_norm"] > 0
        with pytest.raises(RuntimeError, match="differ in their digests"):  # the update moved them
            check_sync(rollout, trainer, canary)
        sync(trainer, rollout)
