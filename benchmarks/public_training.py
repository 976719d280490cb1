# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO as the public training loop does it, on one device, until its held-out reward is reached.

    python -m benchmarks.public_training --settings published --until 0.8 --limit 600 --log FILE

Model, LoRA, prompts, groups, reward and batch are of the recipe `words-flow-grpo`. The order of the work is that of
github.com/yifan123/flow_grpo, written anew: each batch holds whole groups and is sampled eagerly with fp32 weights
under bf16 autocast; its pictures go to the reward's processes while the next batch is sampled; all rewards are waited
for; samples without an advantage are left out, the rest is shuffled and cut into as many batches as were sampled; each
batch is replayed step after step, each step with its own backward pass, and some batches make one step of AdamW.

`published` has the public script's settings (learning rate 3e-4, clip 1e-4, KL .04, two optimiser steps an iteration,
nine of ten steps trained, an average of .9 that moves at every eighth step), `recipe` those of `words-flow-grpo`.
Held-out prompts are drawn with the average where there is one, as there and in the flow. Of what costs time in the
public script its search for each sample's noise level is left out. A line of JSON an iteration.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model
from torch import Tensor

from benchmarks.followed_runs import append_line
from models.config.actor import EmaConfig, OptimConfig
from models.families.stable_diffusion_3 import StableDiffusion3
from models.schedulers.kernels import gaussian_log_prob, sde_step
from models.training.schedules import build_lr_scheduler
from models.training.shards import TrainedShards
from models.training.weight_copies import WeightAverage
from tasks.actors.reward_pool import call_spans
from tasks.config.recipes import changed_recipe
from tasks.config.tree import TrainConfig
from tasks.data.prompts import Prompt, load_prompts
from tasks.rewards import get_reward

RECIPE = "words-flow-grpo"


@dataclass(frozen=True)
class LoopSettings:
    """What the public script and the recipe set differently.

    Attributes:
        optim: AdamW, and how its learning rate goes.
        kl: coefficient of mean (mu - mu_ref)^2 / (2 g^2).
        updates: optimiser steps an iteration.
        global_std: divide by the deviation of all rewards, not the group's.
        window: (first, end, size) of the steps that are random and trained; None is all but the last.
        ema: of the average that the held-out prompts are drawn with.
        same_noise: a group's samples start from the same noise (`sample.same_latent` there).
    """

    optim: OptimConfig
    clip: float
    kl: float
    updates: int
    global_std: bool
    window: tuple[int, int, int] | None
    ema: EmaConfig
    same_noise: bool = False


PUBLISHED = LoopSettings(
    optim=OptimConfig(lr=3e-4, betas=(0.9, 0.999), weight_decay=1e-4, lr_warmup_steps=0),
    clip=1e-4,
    kl=0.04,
    updates=2,
    global_std=True,
    window=None,
    ema=EmaConfig(enable=True, decay=0.9, update_interval=8),
)
"""The public script's for OCR with Stable Diffusion 3.5."""


def settings_of(name: str, config: TrainConfig) -> LoopSettings:
    """By name: `published`, or `recipe`, which takes the config's."""
    if name == "published":
        return PUBLISHED
    actor, algo = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.algo
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size
    steps = config.actor_rollout_ref.rollout.pipeline.num_inference_steps
    lo, hi = algo.sde_window_range or (0, steps - 1)
    return LoopSettings(
        actor.optim.spanning(config.trainer.total_training_steps * updates),
        actor.diffusion_loss.clip_ratio,
        actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        updates,
        config.algorithm.global_std,
        (lo, hi, algo.sde_window_size or hi - lo),
        actor.ema,
        algo.init_same_noise,
    )


class Readers:
    """The trained reward in as many processes as the recipe gives it."""

    def __init__(self, config: TrainConfig):
        trained = {name: entry for name, entry in config.reward.named().items() if entry[1].share}
        ((name, entry),) = trained.values()
        self.size, self.workers = entry.batch_size, entry.num_workers
        self.pool = ProcessPoolExecutor(
            entry.num_workers, get_context("spawn"), _load_reward, (name, dict(entry.options), entry.share)
        )
        # All are started now: the pool would start one at a time as work comes.
        list(self.pool.map(_warm, range(4 * entry.num_workers)))

    def submit(self, pictures: np.ndarray, prompts: Sequence[Prompt]) -> list[Future[np.ndarray]]:
        """Begin to score a batch of pictures, uint8 [N, height, width, 3], in as many calls as the flow makes."""
        calls = call_spans([0, len(prompts)], self.size, self.workers)
        return [self.pool.submit(_score, pictures[first:end], prompts[first:end]) for first, end in calls]

    def close(self) -> None:
        self.pool.shutdown()


_reward: Any = None
_share = 1.0


def _load_reward(name: str, options: dict[str, Any], share: float) -> None:
    global _reward, _share
    torch.set_num_threads(1)
    _reward, _share = get_reward(name, **options), share


def _warm(_: int) -> None:
    time.sleep(0.05)


def _score(pictures: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
    return _share * _reward(pictures, prompts).scores


@dataclass
class Samples:
    """An iteration's samples in one tensor each: [B, ...], latents [B, steps + 1, ...]."""

    text: Tensor
    pooled: Tensor
    latents: Tensor
    log_probs: Tensor

    def rows(self, chosen: Tensor) -> "Samples":
        return Samples(self.text[chosen], self.pooled[chosen], self.latents[chosen], self.log_probs[chosen])


class PublicTraining:
    """Model, optimiser, reward and prompts of one run."""

    def __init__(self, config: TrainConfig, settings: LoopSettings):
        self.settings, self.device = settings, config.trainer.device
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        self.rollout, self.half = rollout, model.dtype == "bfloat16"
        self.seed = config.trainer.seed
        torch.manual_seed(self.seed)
        self.draw = np.random.default_rng(self.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.prompts = load_prompts(config.data.prompts, "train")
        self.held_out = load_prompts(config.data.prompts, "test")
        self.groups, self.samples_each = config.data.train_batch_size, rollout.n
        self.batch = rollout.micro_batch_size
        pipeline = StableDiffusion3Pipeline.from_pretrained(model.path, dtype=torch.float32)
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = pipeline.to(self.device)
        for part in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
            getattr(pipeline, part).requires_grad_(False)
        lora = LoraConfig(
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,
            init_lora_weights="gaussian",
            target_modules=list(StableDiffusion3.lora_target_modules),
        )
        self.model: Any = get_peft_model(pipeline.transformer, lora)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.average, self.optimizer_steps = WeightAverage(TrainedShards(self.model), settings.ema), 0
        optim = settings.optim
        self.optimizer = torch.optim.AdamW(
            self.parameters, optim.lr, optim.betas, optim.eps, weight_decay=optim.weight_decay
        )
        self.rate = build_lr_scheduler(self.optimizer, optim)
        self.steps = rollout.pipeline.num_inference_steps
        pipeline.scheduler.set_timesteps(self.steps, device=self.device)
        self.timesteps = pipeline.scheduler.timesteps.to(self.device)
        self.sigmas = pipeline.scheduler.sigmas.to(self.device)
        self.readers = Readers(config)

    # ---- sampling

    def _window(self) -> list[int]:
        lo, hi, size = self.settings.window or (0, self.steps - 1, self.steps - 1)
        start = int(self.draw.integers(lo, hi - size + 1))
        return list(range(start, start + size))

    def _batches(self) -> Iterator[list[Prompt]]:
        """Prompts of each sampled batch: whole groups, mixed."""
        groups_each = max(1, self.batch // self.samples_each)
        for first in range(0, self.groups, groups_each):
            chosen = self.draw.choice(len(self.prompts), min(groups_each, self.groups - first), replace=False)
            yield [self.prompts[i] for i in self.draw.permutation(np.repeat(chosen, self.samples_each))]

    def _text(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            [prompt.prompt for prompt in prompts],
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.rollout.pipeline.max_sequence_length,
        )
        return embeds, pooled

    def _velocity(self, latents: Tensor, step: int, text: Tensor, pooled: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            velocity = self.model(
                hidden_states=latents,
                timestep=self.timesteps[step].expand(len(latents)),
                encoder_hidden_states=text,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        return velocity.float()

    def _step(self, latents: Tensor, velocity: Tensor, step: int, noise: float) -> Any:
        now, then, second = (self.sigmas[i].reshape(1, 1, 1, 1) for i in (step, step + 1, 1))
        return sde_step(latents, velocity, now, then, second, noise)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], window: Sequence[int]) -> tuple[Samples, np.ndarray]:
        """Samples, and their pictures, uint8 [B, height, width, 3]; log-probs are 0 where no noise is drawn."""
        self.model.eval()
        text, pooled = self._text(prompts)
        x = self._noise_to_start_from(prompts, shared=self.settings.same_noise and len(window) > 0)
        path, log_probs = [x], []
        for step in range(self.steps):
            random = step in window
            reached = self._step(x, self._velocity(x, step, text, pooled), step, self.noise if random else 0.0)
            x = reached.mean + reached.std_dev_t * torch.randn_like(x) if random else reached.mean
            path.append(x)
            log_probs.append(gaussian_log_prob(x, reached) if random else torch.zeros(len(x), device=self.device))
        vae = self.pipeline.vae
        decoded = vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        pictures = (decoded / 2 + 0.5).clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        return Samples(text, pooled, torch.stack(path, 1), torch.stack(log_probs, 1)), pictures

    def _noise_to_start_from(self, prompts: Sequence[Prompt], shared: bool) -> Tensor:
        """[B, channels, height, width] of latents, of each sample its own or of each prompt."""
        size = (self.rollout.pipeline.height // 8, self.rollout.pipeline.width // 8)
        starts, of = np.unique([p.uid for p in prompts] if shared else range(len(prompts)), return_inverse=True)
        drawn = torch.randn(len(starts), self.pipeline.transformer.config.in_channels, *size, device=self.device)
        return drawn[of]

    @property
    def noise(self) -> float:
        return float(self.rollout.algo.noise_level)

    # ---- learning

    def iterate(self) -> tuple[float, int, float]:
        """One iteration: (mean reward, pictures, share of clipped ratios)."""
        window, parts, waiting, prompts = self._window(), [], [], []
        for batch in self._batches():
            samples, pictures = self.sample(batch, window)
            waiting += self.readers.submit(pictures, batch)
            parts.append(samples)
            prompts += batch
        rewards = np.concatenate([answer.result() for answer in waiting])
        scores = advantages(rewards, [prompt.uid for prompt in prompts], self.settings.global_std)
        samples = Samples(*(torch.cat([getattr(part, name) for part in parts]) for name in Samples.__annotations__))
        kept = counted(scores, len(parts), self.draw)
        clipped = self._update(samples, torch.from_numpy(scores).float().to(self.device), kept, len(parts), window)
        return float(rewards.mean()), len(rewards), clipped

    def _update(self, samples: Samples, scores: Tensor, kept: np.ndarray, batches: int, window: Sequence[int]) -> float:
        self.model.train()
        rows = torch.from_numpy(self.draw.permutation(kept)).to(self.device)
        parts = rows.split(max(1, len(rows) // batches)) if len(rows) else ()
        together = max(1, len(parts) // self.settings.updates)
        clipped = []
        for number, part in enumerate(parts, 1):
            batch, score = samples.rows(part), scores[part].clamp(-5.0, 5.0)
            for step in window:
                loss, share = self._loss(batch, score, step)
                (loss / (together * len(window))).backward()
                clipped.append(share)
            if number % together == 0:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.optim.clip_grad)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.rate.step()
                self.optimizer_steps += 1
                self.average.update(self.optimizer_steps)
        return float(torch.stack(clipped).mean()) if clipped else 0.0

    def _loss(self, batch: Samples, score: Tensor, step: int) -> tuple[Tensor, Tensor]:
        now, then = batch.latents[:, step], batch.latents[:, step + 1]
        reached = self._step(now, self._velocity(now, step, batch.text, batch.pooled), step, self.noise)
        ratio = (gaussian_log_prob(then, reached) - batch.log_probs[:, step]).exp()
        clip = self.settings.clip
        loss = torch.maximum(-score * ratio, -score * ratio.clamp(1 - clip, 1 + clip)).mean()
        if self.settings.kl:
            with torch.no_grad(), self.model.disable_adapter():
                start = self._step(now, self._velocity(now, step, batch.text, batch.pooled), step, self.noise)
            length = (self.sigmas[step] - self.sigmas[step + 1]).sqrt()
            diffusion = reached.std_dev_t / length
            loss = loss + self.settings.kl * ((reached.mean - start.mean).square() / (2 * diffusion**2)).mean()
        return loss, ((ratio - 1).abs() > clip).float().mean().detach()

    # ---- measuring

    def validate(self) -> float:
        """Mean reward of the held-out prompts by the ODE, from the same noise every time."""
        evaluated = self.average.applied() if self.settings.ema.enable else nullcontext()
        with evaluated, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(self.seed + 1)
            prompts = [prompt for prompt in self.held_out for _ in range(self.rollout.val_kwargs.n)]
            answers = []
            for at in range(0, len(prompts), self.batch):
                part = prompts[at : at + self.batch]
                answers += self.readers.submit(self.sample(part, ())[1], part)
        return float(np.concatenate([answer.result() for answer in answers]).mean())


def advantages(rewards: np.ndarray, groups: Sequence[str], global_std: bool) -> np.ndarray:
    """(r - mean of the group) / (deviation + 1e-4) [B], deviations with ddof 0 as there."""
    of, found = np.asarray(groups), np.empty(len(rewards), np.float64)
    for group in np.unique(of):
        mine = rewards[of == group].astype(np.float64)
        found[of == group] = (mine - mine.mean()) / ((rewards if global_std else mine).std(dtype=np.float64) + 1e-4)
    return found


def counted(scores: np.ndarray, batches: int, draw: np.random.Generator) -> np.ndarray:
    """Rows whose advantage is not 0, filled up with others to a multiple of `batches`."""
    kept, empty = np.flatnonzero(scores), np.flatnonzero(scores == 0)
    lacking = -len(kept) % batches
    return np.concatenate([kept, draw.choice(empty, lacking, replace=False)]) if lacking <= len(empty) else kept


def run(config: TrainConfig, settings: LoopSettings, given: argparse.Namespace) -> str:
    """Train until the held-out reward or the limit; how it ended."""
    loop = PublicTraining(config, settings)
    seconds, images, reward, clipped = 0.0, 0, None, None
    total, every = given.iterations or 10**9, config.trainer.test_freq
    for iteration in range(total + 1):
        if iteration:
            began = time.perf_counter()
            reward, count, clipped = loop.iterate()
            if loop.device == "cuda":
                torch.cuda.synchronize()
            seconds, images = seconds + time.perf_counter() - began, images + count
        wall = time.time() - given.began
        out = wall > given.limit
        held_out = loop.validate() if iteration % every == 0 or out or iteration == total else None
        line = {"run": given.name, "seed": loop.seed, "iteration": iteration, "images": images, "training_s": seconds}
        line |= {"wall_s": time.time() - given.began, "reward": reward, "held_out": held_out, "clipped": clipped}
        append_line(given.log, line)
        if held_out is not None and held_out >= given.until:
            break
        if out:
            break
    loop.readers.close()
    reached = held_out is not None and held_out >= given.until
    return "goal" if reached else "limit" if out else "finished"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", choices=["published", "recipe"], default="published")
    parser.add_argument("--name", help="of the run in the log")
    parser.add_argument("--until", type=float, default=0.8, help="held-out reward at which it ends")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which it ends")
    parser.add_argument("--iterations", type=int, help="iterations after which it ends")
    parser.add_argument("--log", type=Path, default=Path("runs/time_to_reward/results.jsonl"))
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="changed in the recipe")
    given = parser.parse_args()
    given.name = given.name or f"public loop, {given.settings}"
    config = changed_recipe(RECIPE, given.set)
    end = run(config, settings_of(given.settings, config), given)
    wall = time.time() - given.began
    append_line(given.log, {"run": given.name, "seed": config.trainer.seed, "end": end, "wall_s": wall})


if __name__ == "__main__":
    main()
