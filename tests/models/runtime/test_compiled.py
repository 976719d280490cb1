# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks in bf16: sampling, rescoring and the first update round alike, so the first ratio is exactly 1."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from torch import nn
from torch._dynamo.utils import counters

from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.runtime.compile_cache import VARIABLE, use_compile_cache
from models.runtime.compiled import VARIANTS, OneGraph, compile_decoder
from models.runtime.recomputation import recomputed
from models.samples.trajectories import RolloutRequest, Trajectories
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.canary import Canary
from models.weights.trainable import trainable
from tests.support.helpers import (
    actor_config,
    model_config,
    noise_keys,
    rollout_request,
    save_tiny_model,
)
from tests.support.tiny_models import FAMILIES, embeddings_of

ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5])
BLOCKS_OF_TWO = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}


def trainer(config: DiffusionModelConfig, **settings: Any) -> DiffusersFSDPEngine:
    engine = DiffusersFSDPEngine(config, actor_config(**settings))
    engine.initialize()
    return engine


def compilations() -> int:
    """Graphs that were compiled so far, or read from the disk, forward and backward."""
    return sum(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss", "bypass"))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_the_first_ratio_is_exactly_one_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guided, with LoRA. Graphs that were compiled apart differ by 1e-3, more than most clip ranges.

    What the rollout has compiled the trainer finds on the disk, and a trainer that is warm compiles nothing more.
    """
    monkeypatch.setenv(VARIABLE, "")
    kept = use_compile_cache(str(tmp_path / "cache"))
    checkpoint = save_tiny_model(tmp_path / "model", layers=1)
    config = model_config(checkpoint, dtype="bfloat16", lora_rank=4, lora_alpha=8, true_cfg_scale=3.0, compile=True)
    rollout = DiffusersRolloutEngine(config, batch_size=4)
    for gradient in ("both", "conditional"):
        request = rollout_request(negative_length=4, record_unconditional=gradient == "conditional")
        trajectories = rollout.produce(request).recorded
        compiled = compilations()
        rollout.produce(replace(request, keys=request.keys[:3], prompt_index=request.prompt_index[:3]), config.pipeline)
        assert compilations() == compiled  # a validation's last batch
        assert isinstance(trajectories, Trajectories)
        engine = trainer(config, guidance_gradient=gradient, lr=1e-6)
        engine.warm_up(Canary(request.prompts, rows=4))
        assert all(shard.grad is None for shard in trainable(engine.module).values())
        compiled = compilations()
        own = engine.rescored(replace(trajectories, unconditional=None))
        assert torch.equal(own.log_probs, trajectories.log_probs)
        metrics = engine.update_policy([ActorBatch([(trajectories, ADVANTAGES)], 4)])
        assert metrics["logprob_abs_diff/max"] == 0.0
        assert metrics["ratio_deviation/max"] == 0.0
        assert metrics["grad_norm"] > 0
        assert counters["inductor"]["fxgraph_cache_hit"] > 0
        assert compilations() == compiled
        rescored = engine.rescored(replace(trajectories, unconditional=None))
        again = engine.update_policy([ActorBatch([(rescored, ADVANTAGES)], 4)])
        assert again["logprob_abs_diff/max"] == 0.0
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert list((kept / "fxgraph").rglob("*"))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_code_is_compiled_once_for_texts_of_every_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch would compile no more: a data set has more lengths than that, and one each would end the run."""
    monkeypatch.setenv(VARIABLE, "")
    use_compile_cache(str(tmp_path / "cache"))
    checkpoint = save_tiny_model(tmp_path / "model", layers=1)
    config = model_config(checkpoint, dtype="bfloat16", lora_rank=4, lora_alpha=8, compile=True)
    rollout, engine = DiffusersRolloutEngine(config, batch_size=4), trainer(config, lr=1e-30)
    eager = DiffusersRolloutEngine(replace(config, model=config.model.model_copy(update={"compile": False})))
    compiled: list[int] = []
    for length in (5, 9, 3, 12):
        request = rollout_request(samples=4, lengths=(length,))
        trajectories: Any = rollout.produce(request).recorded
        metrics = engine.update_policy([ActorBatch([(trajectories, ADVANTAGES)], 4)])
        assert metrics["logprob_abs_diff/max"] == 0.0
        if not compiled:
            plain: Any = eager.produce(request).recorded
            torch.testing.assert_close(trajectories.log_probs, plain.log_probs, rtol=0.05, atol=0.05)
        compiled.append(compilations())
    assert compiled == compiled[:1] * 4


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_a_rollout_traces_no_graph_anew_that_a_trainer_has_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps a graph with gradient once its backward pass is compiled, where no length in it is a variable."""
    monkeypatch.setenv(VARIABLE, "")
    use_compile_cache(str(tmp_path / "cache"))
    FAMILIES["stable_diffusion_3"].save(tmp_path)
    sizes = {"height": 16, "width": 24}
    config = model_config(tmp_path, dtype="bfloat16", lora_rank=4, lora_alpha=8, compile=True, **sizes)
    canary = Canary(embeddings_of(config, [5, 5], None), rows=4)
    trainer(config).warm_up(canary)
    torch._dynamo.reset()
    counters.clear()
    DiffusersRolloutEngine(config, batch_size=4).canary_velocity(canary)
    kept = counters["aot_autograd"]
    assert (kept["autograd_cache_miss"], kept["autograd_cache_bypass"]) == (0, 0)
    assert kept["autograd_cache_hit"] == kept["total"] > 0


def test_torch_compiles_as_many_forms_of_z_image_as_its_texts_have_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its blocks share their code, of which too many forms would end the process in the middle of a run."""
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, *, options, **how: compile_with(f, backend="eager", **how))
    FAMILIES["z_image"].save(tmp_path)
    sizes = {"height": 16, "width": 24, "num_inference_steps": 1, "guidance_scale": 2.0}
    config = model_config(tmp_path, lora_rank=4, lora_alpha=8, compile=True, **sizes)
    rollout, forms = DiffusersRolloutEngine(config, batch_size=2), list[int]()
    for length in (32, 64, 96):
        text = embeddings_of(config, [length], 10)
        rollout.produce(RolloutRequest(noise_keys(1, 2), text, torch.zeros(2, dtype=torch.long), ()))
        forms.append(counters["stats"]["unique_graphs"])
    of_a_length = forms[2] - forms[1]
    assert forms[1] - forms[0] == of_a_length > 0
    most_lengths, numbers_of_rows = 512 // 32, 8
    assert of_a_length * most_lengths * numbers_of_rows <= VARIANTS


@pytest.mark.slow
def test_an_image_decoder_is_compiled_without_a_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another process draws other pictures of equal latents, and a run made again reads others than before."""
    seen: list[bool] = []
    inductor = torch._inductor.config
    monkeypatch.setattr(inductor, "post_grad_custom_pre_pass", lambda graph: seen.append(inductor.deterministic))
    torch.manual_seed(0)
    vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, **BLOCKS_OF_TWO).eval()
    latents = torch.randn(2, 4, 4, 8)
    with torch.no_grad():
        eager = vae.decode(latents).sample
        compile_decoder(vae)
        torch.testing.assert_close(vae.decode(latents).sample, eager, rtol=1e-4, atol=1e-4)
    assert seen
    assert all(seen)


@pytest.mark.parametrize("gradient", ["both", "conditional"])
@pytest.mark.usefixtures("one_rank")
def test_rescored_log_probs_are_what_the_first_update_computes(tiny_model: Path, gradient: str) -> None:
    """The half that takes no gradient is computed alone in both, whatever the rollout would have recorded."""
    config = model_config(tiny_model, dtype="bfloat16", true_cfg_scale=3.0)
    trajectories: Any = DiffusersRolloutEngine(config).produce(rollout_request(negative_length=4)).recorded
    engine = trainer(config, guidance_gradient=gradient)
    rescored = engine.rescored(trajectories)
    assert engine.update_policy([ActorBatch([(rescored, ADVANTAGES)], 4)])["logprob_abs_diff/max"] == 0.0


def test_compiled_code_is_kept_where_nobody_else_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = use_compile_cache(None)
    assert place == tmp_path / "doubleflow/compiled"
    assert os.environ[VARIABLE] == str(place)
    place.chmod(0o777)
    assert use_compile_cache(None) == place  # by the variable now
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    (place / "planted").touch()
    use_compile_cache(None)
    place.chmod(0o770)
    with pytest.raises(PermissionError, match=r"could be written by other users \(mode 770\).*a folder of your own"):
        use_compile_cache(None)
    place.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(PermissionError, match=r"belongs to the user with the number .* a folder of your own"):
        use_compile_cache(str(place))


class Net(nn.Module):
    """Two linear blocks that note what their inputs asked of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.seen: list[bool] = []
        self.gradient_checkpointing = False
        self.anew: list[bool] = []
        graph = OneGraph()
        for block in self.blocks:
            block.forward = graph.of_block(self._noted(block.forward))
        self.forward = graph.of_whole(self)  # type: ignore[method-assign]

    def _noted(self, forward: Any) -> Any:
        def block(tensor: torch.Tensor) -> torch.Tensor:
            self.seen.append(tensor.requires_grad and torch.is_grad_enabled())
            return forward(tensor)

        return block

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            self.anew.append(self.gradient_checkpointing and torch.is_grad_enabled())  # as diffusers asks
            tensor = recomputed(block, tensor) if self.anew[-1] else block(tensor)
        return tensor


def test_each_thread_that_samples_may_compile_as_often(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps its configuration by thread; with its own limit of eight a long run would end."""
    limits: list[int] = []

    def compiled(forward: Any, **_: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            limits.append(torch._dynamo.config.recompile_limit)
            return forward(*arguments, **named)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    engine = DiffusersRolloutEngine(model_config(tiny_model, compile=True))
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(engine.produce, rollout_request()).result()
    assert {*limits} == {VARIANTS}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_call_without_gradient_looks_like_one_with_it_from_inside(checkpointing: bool) -> None:
    """So that the same compiled code is chosen; neither the blocks' activations nor what they are given waits for a
    backward pass."""
    net, given = Net(), torch.ones(2, 3)
    net.gradient_checkpointing = checkpointing
    with torch.no_grad():
        sampled = net(given)
    inside, net.seen = net.seen, []
    learned = net(given)
    assert inside == net.seen == [False, True]
    assert net.anew == [False, False, checkpointing, checkpointing]
    assert not sampled.requires_grad
    assert torch.equal(sampled, learned)
    learned.sum().backward()
    assert len(net.seen) == (4 if checkpointing else 2)
    assert all(parameter.grad is not None for parameter in net.parameters())
