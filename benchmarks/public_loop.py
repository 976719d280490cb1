# SPDX-License-Identifier: Apache-2.0
"""The public Flow-GRPO loop (github.com/yifan123/flow_grpo) on Stable Diffusion 3.5 medium, for one iteration's time.

Its own sampler and SDE step run, from a clone that the caller names; the update follows the order of its training
script: fp32 weights under bf16 autocast, both halves of the guidance in one forward with the one without prompt
detached, step after step, the KL against the model without its adapter, one optimiser step.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model
from torch import Tensor

from benchmarks.real_size import transformer, vae

GUIDANCE, NOISE, CLIP, STEPS, TRAINED = 4.5, 0.7, 0.2, 10, 9


class PublicLoop:
    """The model, the clone's functions and the optimiser."""

    def __init__(self, clone: Path, folder: Path):
        sys.path.insert(0, str(clone))
        from flow_grpo.diffusers_patch.sd3_pipeline_with_logprob import pipeline_with_logprob
        from flow_grpo.diffusers_patch.sd3_sde_with_logprob import sde_step_with_logprob

        self.sample, self.sde_step = pipeline_with_logprob, sde_step_with_logprob
        base = transformer(folder, torch.bfloat16, "cuda").float().requires_grad_(False)
        none: dict[str, Any] = dict.fromkeys(
            ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
        )
        self.pipeline = StableDiffusion3Pipeline(
            transformer=base,
            scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
            vae=vae("StableDiffusion3Pipeline", "cuda", torch.float32).requires_grad_(False),
            **none,
        )
        self.pipeline.set_progress_bar_config(disable=True)
        targets = [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]
        targets += [f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")]
        settings = LoraConfig(r=32, lora_alpha=64, init_lora_weights="gaussian", target_modules=targets)
        self.model: Any = get_peft_model(base, settings)  # type: ignore[arg-type]
        self.pipeline.transformer = self.model
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-4, weight_decay=1e-4)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take our LoRA weights."""
        own = {
            name.removeprefix("base_model.model."): p for name, p in self.model.named_parameters() if p.requires_grad
        }
        assert own.keys() == weights.keys(), sorted(own.keys() ^ weights.keys())[:3]
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])

    def rollout(self, text: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(latents [B, steps + 1, ...], log-probs [B, steps])."""
        self.model.eval()
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            _, latents, log_probs = self.sample(
                self.pipeline,
                **text,
                num_inference_steps=STEPS,
                guidance_scale=GUIDANCE,
                output_type="pt",
                height=512,
                width=512,
                noise_level=NOISE,
            )
        return torch.stack(latents, 1), torch.stack(log_probs, 1)

    def gradients(self, text: dict[str, Tensor], latents: Tensor, old: Tensor, scores: Tensor, kl: float) -> Any:
        """(mean loss, |new - old log-prob| [B, TRAINED]); the gradients are left in the parameters."""
        self.model.train()
        losses, distances = [], []
        for step in range(TRAINED):
            with torch.autocast("cuda", torch.bfloat16):
                log_prob, mean, deviation = self._replayed(text, latents, step)
                if kl:
                    with torch.no_grad(), self.model.disable_adapter():
                        _, reference, _ = self._replayed(text, latents, step)
            ratio = (log_prob - old[:, step]).exp()
            loss = torch.maximum(-scores * ratio, -scores * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            if kl:
                loss = loss + kl * ((mean - reference).square() / (2 * deviation**2)).mean()
            (loss / TRAINED).backward()
            losses.append(loss.detach())  # not read here: the public loop does not wait for each step's either
            distances.append((log_prob.detach() - old[:, step]).abs())
        return torch.stack(losses).mean().item(), torch.stack(distances, 1)

    def _replayed(self, text: dict[str, Tensor], latents: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        timestep = self.pipeline.scheduler.timesteps[step].expand(len(latents))
        halves = self.model(
            hidden_states=torch.cat([latents[:, step]] * 2),
            timestep=torch.cat([timestep] * 2),
            encoder_hidden_states=torch.cat([text["negative_prompt_embeds"], text["prompt_embeds"]]),
            pooled_projections=torch.cat([text["negative_pooled_prompt_embeds"], text["pooled_prompt_embeds"]]),
            return_dict=False,
        )[0]
        without, with_prompt = halves.chunk(2)
        velocity = without.detach() + GUIDANCE * (with_prompt - without.detach())
        _, log_prob, mean, deviation = self.sde_step(
            self.pipeline.scheduler,
            velocity.float(),
            timestep,
            latents[:, step].float(),
            prev_sample=latents[:, step + 1].float(),
            noise_level=NOISE,
        )
        return log_prob, mean, deviation

    def step(self) -> float:
        """Clip, step; the gradient's norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def run(clone: Path, work: Path, batch: int, kl: float, repeats: int = 2) -> dict[str, Any]:
    """Seconds of its iteration, and how far its loss, gradient and log-probs are from ours on our own samples."""
    torch.backends.cuda.matmul.allow_tf32 = True
    loop = PublicLoop(clone, work / "model")
    numbers: dict[str, Any] = {"variant": "public loop", "kl": kl, "batch": batch}
    loop.pipeline.scheduler.set_timesteps(STEPS, device="cuda")
    first = torch.load(work / "first.pt", weights_only=False)
    loop.load(first["weights"])
    if not kl:
        numbers |= _compared(loop, first["trajectories"].to("cuda"), batch)
    text = {name: torch.randn(batch, 205, 4096, device="cuda").bfloat16() for name in _NAMES[:2]}
    text |= {name: torch.randn(batch, 2048, device="cuda").bfloat16() for name in _NAMES[2:]}
    times: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        latents, log_probs = loop.rollout(text)
        torch.cuda.synchronize()
        sampled = time.perf_counter()
        loop.gradients(text, latents, log_probs, torch.randn(batch, device="cuda"), kl)
        loop.step()
        torch.cuda.synchronize()
        times.append((sampled - start, time.perf_counter() - sampled))
    numbers["rollout_s"], numbers["update_s"] = (min(part) for part in zip(*times[1:], strict=True))
    numbers["images/s"] = batch / (numbers["rollout_s"] + numbers["update_s"])
    numbers["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return numbers


_NAMES = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")


def _compared(loop: PublicLoop, samples: Any, batch: int) -> dict[str, float]:
    """Its loss, gradient norm and log-probs of our samples, under our weights, in parts of `batch`."""
    from benchmarks.iteration import advantages_of

    index = samples.prompt_index
    text = samples.prompts.expand(index)
    scores = advantages_of(len(samples)).to("cuda")
    losses, distances = [], []
    for rows in torch.arange(len(samples), device="cuda").split(batch):
        part = {name: text[name][rows] for name in _NAMES}
        loss, distance = loop.gradients(part, samples.latents[rows], samples.log_probs[rows], scores[rows], 0.0)
        losses.append(loss)
        distances.append(distance)
    parts = len(losses)
    for parameter in loop.parameters:
        if parameter.grad is not None:
            parameter.grad /= parts
    off = torch.cat(distances)
    return {
        "pg_loss": sum(losses) / parts,
        "logprob_abs_diff/mean": off.mean().item(),
        "logprob_abs_diff/max": off.max().item(),
        "grad_norm": loop.step(),
    }
