# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the tokens of their samples are one rank: loss, gradients, weights, and what the rollout is sent."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.config.actor import ForwardProcessConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.rollout.sampling import sample
from models.samples.trajectories import PromptTable, RolloutRequest, Trajectories
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.training.sequence_parallel import check_sequence_split
from models.weights.canary import Canary
from tests.support.helpers import (
    actor_config,
    gloo_world,
    largest_difference,
    model_config,
    noise_keys,
    prompt_table,
    single_rank,
)

RANKS, SHARING = 4, 2
ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5])
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5}
AT_ONCE = {"shard_frozen": False, "reshard_after_forward": False, "gradient_checkpointing": True}
# family -> settings of model and actor. Qwen-Image's text of five tokens is padded; Wan's is whole on every rank.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wan": ({"lora_rank": 4, "lora_alpha": 8, "num_frames": 5, "height": 32, "width": 64}, AT_ONCE | KL),
    "qwen_image": ({"true_cfg_scale": 2.0}, {"loss_mode": "awm", "gradient_checkpointing": True, **KL}),
    "flux_2_klein": ({"lora_rank": 4, "lora_alpha": 8, "height": 16, "width": 24}, KL),
}


def config_of(family: str, folder: Path) -> DiffusionModelConfig:
    return model_config(folder / family, **CASES[family][0])


def prompts_of(family: str) -> PromptTable:
    table = prompt_table((5, 3), negative_length=3)
    if family == "qwen_image":
        return table
    if family == "flux_2_klein":  # whose text is split as it is
        embeds = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(0))
        return PromptTable(embeds, torch.ones(2, 6, dtype=torch.bool))
    return PromptTable(table.prompt_embeds[..., :16].contiguous(), torch.ones_like(table.prompt_embeds_mask))


def sampled(family: str, folder: Path) -> Any:
    """Four samples of two prompts: paths for the policy gradient, finished latents for the forward process."""
    config = config_of(family, folder)
    adapter, finished = DiffusionModelBase.get_class(config), family == "qwen_image"
    window, index = () if finished else (0, 1), torch.tensor([0, 0, 1, 1])
    request = RolloutRequest(noise_keys(2, 2), prompts_of(family), index, window, record_finished=finished)
    module, scheduler = adapter.load_transformer(config, torch.float32), adapter.build_scheduler(config)
    return sample(adapter, module, scheduler, config, request, "cpu").recorded()


def trained(rank: int, folder: Path, samples: dict[str, Any], sharing: int) -> dict[str, dict[str, Any]]:
    """Two updates of every case; what the trainer says of its samples before and of the canary after."""
    results = {}
    for family, (_, settings) in CASES.items():
        actor = {"clip_grad": 0.1, "ppo_micro_batch_size_per_gpu": 1, "ulysses_sequence_parallel_size": sharing}
        engine = DiffusersFSDPEngine(
            config_of(family, folder), actor_config(**actor | settings), forward_config=ForwardProcessConfig()
        )
        engine.initialize()
        share = torch.arange(4).chunk(dist.get_world_size() // sharing)[rank // sharing]
        own = samples[family].rows(share)
        scored = engine.rescored(own).log_probs if isinstance(own, Trajectories) else torch.zeros(0)
        metrics = [engine.update_policy([ActorBatch([(own, ADVANTAGES[share])], 4)]) for _ in range(2)]
        canary = engine.canary_velocity(Canary(prompts_of(family)))
        results[family] = {"scored": scored, "metrics": metrics, "canary": canary, "weights": engine.gather_weights()}
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of every family that the tests name."""
    from tests.support.tiny_models import FAMILIES  # here, so that the ranks start without the text encoders

    folder = tmp_path_factory.mktemp("families")
    for family in (*CASES, "flux", "z_image"):
        FAMILIES[family].save(folder / family)
    return folder


@pytest.mark.slow
def test_four_ranks_in_two_groups_train_as_one(folder: Path, tmp_path: Path) -> None:
    """The groups have different samples, their two ranks the same ones. Only the order of sums differs."""
    samples = {family: sampled(family, folder) for family in CASES}
    with single_rank():
        one = trained(0, folder, samples, sharing=1)
    four = gloo_world(trained, RANKS, tmp_path, folder, samples, SHARING)
    for family, expected in one.items():
        ranks = [rank[family] for rank in four]
        for number, theirs in enumerate(expected["metrics"]):
            ours = [rank["metrics"][number] for rank in ranks]
            assert ours[0] == ours[1], "ranks of a group compute the same"
            assert [m["grad_norm"] for m in ours] == pytest.approx([theirs["grad_norm"]] * RANKS, rel=1e-3)
            for name in ("pg_loss", "kl_loss"):
                mean = (ours[0][name] + ours[2][name]) / 2
                assert mean == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), (family, name)
        assert largest_difference(ranks[0]["weights"], expected["weights"]) < 1e-5
        assert ours[0]["kl_loss"] > 0
        for rank in ranks:
            torch.testing.assert_close(rank["canary"], expected["canary"], rtol=1e-4, atol=1e-4)
    scored = torch.cat([four[0]["wan"]["scored"], four[2]["wan"]["scored"]])
    torch.testing.assert_close(scored, samples["wan"].log_probs, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_split_is_refused_by_name(folder: Path) -> None:
    def check(family: str, size: int, text_tokens: int = 24, **changes: Any) -> None:
        settings = {"flux": {"guidance_scale": 3.5}}.get(family, CASES.get(family, ({}, {}))[0])
        check_sequence_split(model_config(folder / family, **settings | changes), size, text_tokens)

    for family in (*CASES, "flux"):
        check(family, 2)
    check("z_image", 1)
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size is 2, but the attention of ZImagePipeline"):
        check("z_image", 2)
    with pytest.raises(ValueError, match=r"is 4, which does not divide the 2 attention heads of WanPipeline"):
        check("wan", 4)
    with pytest.raises(ValueError, match=r"does not divide the 1 tokens of a sample: .*height, width or num_frames"):
        check("wan", 2, num_frames=1, width=32)
    with pytest.raises(ValueError, match=r"does not divide the 5 tokens of a prompt: .*max_sequence_length"):
        check("flux", 2, text_tokens=5)
