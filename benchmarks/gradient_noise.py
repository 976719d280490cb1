# SPDX-License-Identifier: Apache-2.0
"""How noisy is a gradient of the forward process over the draws of its noise levels and noise, with the pictures given?

    python -m benchmarks.gradient_noise [--settings nft nft_shared ...] [--draws 12]

96 pictures of the quickstart's first prompts are sampled and scored once. Each draw then noises them anew, at 4 of the
8 levels, and takes the gradient of one optimiser step at the base model. Printed: noise over signal, the trace of the
draws' covariance over the squared length of their mean, and the mean cosine of two draws. Needs `dvc repro`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PICTURES, FinishedLatents, RolloutRequest
from models.schedulers import NoiseKey
from models.training.forward_batches import noised_batch
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch, WeightedMetrics
from tasks.config.recipes import changed_recipe
from tasks.config.tree import TrainConfig
from tasks.data.embeddings import prompt_table
from tasks.rewards.ocr import OcrReward
from tasks.run.preflight import check_inputs
from tasks.run.schedule import part_of
from tasks.stages.advantage import compute_advantage

PROMPTS, LEVELS = 6, 4
SHARED, STRATIFIED = "algorithm.share_noise_in_group=true", "algorithm.timestep_sampling=stratified"
ADAPTIVE = "actor_rollout_ref.actor.diffusion_loss.awm_weighting=adaptive"
NFT, AWM = "algorithm.name=diffusion_nft", "algorithm.name=awm"
SETTINGS: dict[str, list[str]] = {
    "nft": [NFT],
    "nft_shared": [NFT, SHARED],
    "nft_stratified": [NFT, STRATIFIED],
    "nft_both": [NFT, SHARED, STRATIFIED],
    "awm": [AWM],
    "awm_both": [AWM, SHARED, STRATIFIED],
    "awm_adaptive": [AWM, ADAPTIVE],
    "awm_all": [AWM, SHARED, STRATIFIED, ADAPTIVE],
}

Pool = Sequence[tuple[FinishedLatents, Tensor]]


def config_of(name: str) -> TrainConfig:
    """The recipe `flow-grpo` with the setting, without a distance to the start, whose noise is not the rewards'."""
    changes = [*SETTINGS[name], f"algorithm.num_train_timesteps={LEVELS}"]
    changes += ["actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.kl_loss_coef=0.0"]
    return changed_recipe("flow-grpo", changes)


def pool_of(config: TrainConfig) -> Pool:
    """The samples, in the recipe's batches, each with its advantages [B]."""
    inputs, rollout = check_inputs(config), config.actor_rollout_ref.rollout
    engine, reward = DiffusersRolloutEngine(inputs.model_config), OcrReward()
    prompts = part_of(inputs.train, config.data.train_batch_size, 0, 1)[:PROMPTS]
    samples = [(prompt, index) for prompt in prompts for index in range(rollout.n)]
    parts, scores = [], []
    for start in range(0, len(samples), rollout.batch_size):
        part = samples[start : start + rollout.batch_size]
        uids = list(dict.fromkeys(prompt.uid for prompt, _ in part))
        request = RolloutRequest(
            keys=tuple(NoiseKey(0, 1, prompt.uid, index) for prompt, index in part),
            prompts=prompt_table(inputs.embeddings, uids, needs_negative=False),
            prompt_index=torch.tensor([uids.index(prompt.uid) for prompt, _ in part]),
            window=(),
            record_finished=True,
            outputs=frozenset({PICTURES}),
        )
        pictures, finished = engine.generate(request)
        parts.append(cast(FinishedLatents, finished))
        scores.append(reward.score(pictures.numpy(), [prompt for prompt, _ in part]).scores)
    data = {"sample_level_rewards": np.concatenate(scores), "uid": np.array([prompt.uid for prompt, _ in samples])}
    found = compute_advantage(data, "flow_grpo", global_std=config.algorithm.global_std)["advantages"]
    return list(zip(parts, torch.tensor(found).split([len(part) for part in parts]), strict=True))


def gradients(config: TrainConfig, pool: Pool, draws: int) -> Tensor:
    """[draws, P] fp64: of the same samples, noised by other keys each time."""
    actor = config.actor_rollout_ref.actor
    engine = DiffusersFSDPEngine(check_inputs(config).model_config, actor, "cpu", config.algorithm)
    engine.initialize()
    rows = []
    for draw in range(draws):
        parts = [
            (replace(part, keys=tuple(replace(key, iteration=100 + draw) for key in part.keys)), advantages)
            for part, advantages in pool
        ]
        batch = noised_batch(engine, ActorBatch(parts, 0), config.algorithm, actor.micro_batch)
        engine._accumulate_gradients(batch, WeightedMetrics(), True)
        whole = [parameter.grad for parameter in engine._trained.held().values() if parameter.grad is not None]
        flat = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in whole]
        rows.append(torch.cat([grad.flatten() for grad in flat]).double())
        engine.optimizer.zero_grad()
    return torch.stack(rows)


def noise_over_signal(rows: Tensor) -> tuple[float, float]:
    """Of gradients [draws, P]: the covariance's trace over the mean's squared length, both unbiased; and the mean
    cosine of two of them."""
    count, mean = len(rows), rows.mean(0)
    noise = ((rows - mean) ** 2).sum() / (count - 1)
    signal = (mean**2).sum() - noise / count
    cosines = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)
    return float(noise / signal), float((cosines.sum() - count) / (count * (count - 1)))


def main() -> None:
    """A line a setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--draws", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pool = pool_of(config_of(arguments.settings[0]))
    for name in arguments.settings:
        ratio, cosine = noise_over_signal(gradients(config_of(name), pool, arguments.draws))
        print(f"{name:16} noise/signal {ratio:.3f}  cosine {cosine:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
