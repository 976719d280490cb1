"""The training engine: a diffusers transformer under FSDP2, trained by replaying rollouts step by step."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from models.algorithms.losses import DiffusionLossFn, KLLoss, get_diffusion_loss_fn
from models.base import DiffusionModelBase, DiffusionModelConfig
from models.engines.canary import Canary, canary_velocity
from models.engines.ema import WeightAverage
from models.engines.trajectories import Trajectories
from models.engines.weights import make_trainable, trainable

if TYPE_CHECKING:
    from models.config import DiffusionActorConfig


@dataclass(frozen=True)
class ActorBatch:
    """What one rank trains on in one optimiser step.

    Attributes:
        parts: this rank's samples as they were sampled, each batch with its advantages [B]. A NaN advantage (a
            missing reward) leaves the sample out.
        global_count: samples of the mini-batch that count, over all ranks.
    """

    parts: Sequence[tuple[Trajectories, Tensor]]
    global_count: int

    def micro_batches(self, size: int) -> list[tuple[Trajectories, Tensor]]:
        """The parts, cut where they are larger than `size` and never merged: a merged batch is padded and blocked
        differently, and would not replay its log-probs to the last bit."""
        pieces = []
        for trajectories, advantages in self.parts:
            for index in torch.arange(len(trajectories)).split(size):
                pieces.append((trajectories.rows(index), advantages[index]))
        return pieces


class DiffusersFSDPEngine:
    """One rank of the trainer. torch.distributed must be initialised; every rank makes every call.

    Args:
        model_config: which model and which of its weights.
        actor_config: loss, optimiser, micro-batches, sharding.
        device: "cpu" (gloo) or "cuda" (nccl).
    """

    def __init__(self, model_config: DiffusionModelConfig, actor_config: "DiffusionActorConfig", device: str = "cpu"):
        self.model_config, self.actor_config, self.device = model_config, actor_config, device
        self.adapter = DiffusionModelBase.get_class(model_config)
        self.loss_fn = get_diffusion_loss_fn(actor_config.diffusion_loss.loss_mode)
        self.optimizer_steps = 0

    def initialize(self) -> None:
        """Load, freeze, shard; then optimiser, warm-up, average and, for KL with full weights, the reference."""
        self.module = self._sharded(self._load(trained=True))
        settings = self.actor_config.optim
        self.optimizer = torch.optim.AdamW(
            list(trainable(self.module).values()),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        _allocate_adam_state(self.optimizer)
        warmup = max(settings.lr_warmup_steps, 1)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / warmup))
        self.ema = WeightAverage(self.module, self.actor_config.ema) if self.actor_config.ema.enable else None
        self.scheduler = self.adapter.build_scheduler(self.model_config)
        self.adapter.set_timesteps(self.scheduler, self.model_config, self.device)
        full_kl = self.actor_config.use_kl_loss and self.model_config.model.lora_rank == 0
        self.reference = self._sharded(self._load(trained=False)).eval() if full_kl else None

    # ---- the update

    def update_policy(self, batches: Sequence[ActorBatch]) -> dict[str, float]:
        """One optimiser step per batch.

        Returns:
            Metrics without prefix, averaged over this rank's counted samples, timesteps and optimiser steps.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are then untouched by it.
        """
        collected = WeightedMetrics()
        self.module.train()
        for batch in batches:
            self._accumulate_gradients(batch, collected)
            collected.add({"lr": float(self.lr_scheduler.get_last_lr()[0]), "grad_norm": self._optimizer_step()})
        self.module.eval()
        return collected.combined() | {"optimizer_steps": self.optimizer_steps}

    def _accumulate_gradients(self, batch: ActorBatch, collected: "WeightedMetrics") -> None:
        pieces = batch.micro_batches(self.actor_config.ppo_micro_batch_size_per_gpu)
        for number, (trajectories, advantages) in enumerate(pieces):
            micro_batch, counted = self._micro_batch(trajectories, advantages)
            steps = trajectories.log_probs.shape[1]
            # A rank averages over its own samples and FSDP over ranks; this turns both into one mean over the
            # mini-batch's counted samples and timesteps.
            scale = counted * dist.get_world_size() / (batch.global_count * steps)
            for step in range(steps):
                last = number == len(pieces) - 1 and step == steps - 1
                cast(FSDPModule, self.module).set_requires_gradient_sync(last)
                loss, metrics = self.forward_step(micro_batch, self.loss_fn, step=step)
                (loss * scale).backward()
                collected.add(metrics, counted)

    def _micro_batch(self, trajectories: Trajectories, advantages: Tensor) -> tuple[TensorDict, int]:
        """Inputs of one micro-batch and how many of its samples count.

        With none left, one sample is computed and weighted 0: every rank must take part in the collectives.
        """
        kept = torch.nonzero(~torch.isnan(advantages)).flatten()
        rows = kept if len(kept) else torch.zeros(1, dtype=torch.long)
        trajectories = trajectories.rows(rows).to(self.device)
        text = trajectories.prompts.expand(trajectories.prompt_index)
        tensors = {
            "latents": trajectories.latents,
            "timesteps": trajectories.timesteps,
            "old_log_probs": trajectories.log_probs,
            "advantages": advantages[rows].nan_to_num(0.0).to(self.device),
            **{name: tensor for name, tensor in text.items() if tensor is not None},
        }
        return TensorDict(tensors, batch_size=[len(rows)]), len(kept)

    def forward_step(
        self,
        micro_batch: TensorDict,
        loss_function: DiffusionLossFn | None,
        forward_only: bool = False,
        *,
        step: int = 0,
    ) -> tuple[Any, dict[str, Any]]:
        """Replay one timestep of a micro-batch.

        Args:
            micro_batch: latents [B, W+1, ...], timesteps [B, W], embeddings, old_log_probs [B, W], advantages [B].
            loss_function: applied to the outputs; unused with `forward_only`.
            forward_only: no gradient, no loss.
            step: which of the W timesteps.

        Returns:
            (scalar loss, metrics), or with `forward_only` (model output, {}).
        """
        if forward_only:
            with torch.no_grad():
                return self._replay(self.module, micro_batch, step), {}
        assert loss_function is not None, "forward_step needs a loss_function unless forward_only"
        data = {
            "old_log_probs": micro_batch["old_log_probs"][:, step],
            "advantages": micro_batch["advantages"],
        }
        if self.actor_config.use_kl_loss:
            data["ref_prev_sample_mean"] = self._reference_mean(micro_batch, step)
        output = self._replay(self.module, micro_batch, step)
        name = self.actor_config.diffusion_loss.loss_mode
        loss_function.validate_inputs(loss_name=name, model_output=output, data=data)
        result = loss_function(config=self.actor_config, model_output=output, data=data)
        loss, metrics = result.loss, dict(result.metrics)
        metrics["pg_loss"] = loss.detach()
        if self.actor_config.use_kl_loss:
            kl, kl_metrics = KLLoss.compute_loss(
                prev_sample_mean=output["prev_sample_mean"],
                ref_prev_sample_mean=data["ref_prev_sample_mean"],
                std_dev_t=output["std_dev_t"],
            )
            loss = loss + self.actor_config.kl_loss_coef * kl
            metrics |= kl_metrics
        return loss, metrics

    def replay_log_probs(self, trajectories: Trajectories) -> Tensor:
        """log_probs [B, W] of the samples under the present weights, without gradient."""
        parts = []
        batch = ActorBatch([(trajectories, torch.zeros(len(trajectories)))], len(trajectories))
        for piece, zeros in batch.micro_batches(self.actor_config.ppo_micro_batch_size_per_gpu):
            micro_batch, _ = self._micro_batch(piece, zeros)
            steps = range(trajectories.log_probs.shape[1])
            outputs = [self.forward_step(micro_batch, None, forward_only=True, step=s)[0] for s in steps]
            parts.append(torch.stack([output["log_probs"] for output in outputs], 1))
        return torch.cat(parts).cpu()

    def _replay(self, module: nn.Module, micro_batch: TensorDict, step: int) -> dict[str, Tensor]:
        inputs, negative = self.adapter.prepare_model_inputs(
            module,
            self.model_config,
            micro_batch["latents"],
            micro_batch["timesteps"],
            micro_batch["prompt_embeds"],
            micro_batch["prompt_embeds_mask"],
            micro_batch.get("negative_prompt_embeds"),
            micro_batch.get("negative_prompt_embeds_mask"),
            micro_batch,
            step,
        )
        log_probs, mean, std_dev_t, sqrt_dt = self.adapter.forward_and_sample_previous_step(
            module, self.scheduler, self.model_config, inputs, negative, micro_batch, step
        )
        return {"log_probs": log_probs, "prev_sample_mean": mean, "std_dev_t": std_dev_t, "sqrt_dt": sqrt_dt}

    def _reference_mean(self, micro_batch: TensorDict, step: int) -> Tensor:
        """Mean of the step under the starting weights: the frozen copy, or the model with LoRA switched off."""
        with torch.no_grad():
            if self.reference is not None:
                return self._replay(self.reference, micro_batch, step)["prev_sample_mean"]
            with _adapters_off(self.module):
                return self._replay(self.module, micro_batch, step)["prev_sample_mean"]

    def _optimizer_step(self) -> float:
        parameters = list(trainable(self.module).values())
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.actor_config.optim.clip_grad)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"the gradient norm of optimiser step {self.optimizer_steps} is {norm.item()}: lower optim.lr or check "
                "the rewards of this iteration"
            )
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.optimizer_steps += 1
        if self.ema is not None:
            self.ema.update(self.optimizer_steps)
        return norm.item()

    # ---- weights

    def averaged(self):
        """Context in which the engine's weights are the moving average, where the config asks for one."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def gather_weights(self) -> dict[str, Tensor]:
        """The trained weights, whole and on the CPU; on rank 0 (empty on the others)."""
        gathered = {}
        for name, parameter in trainable(self.module).items():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if dist.get_rank() == 0:
                gathered[name] = whole.detach().cpu().clone()
        return gathered

    def canary_velocity(self, canary: Canary) -> Tensor:
        """What the trainer's model predicts for the canary, fp32 on the CPU."""
        self.module.eval()
        return canary_velocity(self.adapter, self.module, self.model_config, canary, self.device)

    # ---- checkpoint

    def save_checkpoint(self, folder: Path) -> None:
        """Write policy, optimiser, schedule, average and random state, sharded, for any number of ranks to read."""
        dcp.save(self._state(), checkpoint_id=str(folder))

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what `save_checkpoint` wrote, in place."""
        state = self._state()
        dcp.load(state, checkpoint_id=str(folder))
        options = StateDictOptions(ignore_frozen_params=True, strict=False)
        set_model_state_dict(self.module, state["model"], options=options)
        set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"], options=options)
        self.lr_scheduler.load_state_dict(state["extra"]["lr_scheduler"])
        self.optimizer_steps = state["extra"]["optimizer_steps"]
        if self.ema is not None:
            self.ema.updates = state["extra"]["ema_updates"]
        torch.set_rng_state(state["extra"]["torch_rng"])

    def _state(self) -> dict[str, Any]:
        options = StateDictOptions(ignore_frozen_params=True)
        state: dict[str, Any] = {
            "model": get_model_state_dict(self.module, options=options),
            "optimizer": get_optimizer_state_dict(self.module, self.optimizer, options=options),
            "extra": {
                "lr_scheduler": self.lr_scheduler.state_dict(),
                "optimizer_steps": self.optimizer_steps,
                "ema_updates": self.ema.updates if self.ema else 0,
                "torch_rng": torch.get_rng_state(),
            },
        }
        if self.ema is not None:
            state["ema"] = self.ema.shadow
        return state

    # ---- building

    def _load(self, trained: bool) -> nn.Module:
        full = trained and self.model_config.model.lora_rank == 0
        dtype = torch.float32 if full else self.model_config.dtype
        module: Any = self.adapter.load_transformer(self.model_config, dtype)
        if trained:
            make_trainable(self.adapter, module, self.model_config)
            if self.actor_config.fsdp_config.gradient_checkpointing:
                module.enable_gradient_checkpointing()
        else:
            module.requires_grad_(False)
        return module.to(self.device)

    def _sharded(self, module: nn.Module) -> nn.Module:
        settings = self.actor_config.fsdp_config
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, settings.param_dtype or self.model_config.model.dtype),
            reduce_dtype=getattr(torch, settings.reduce_dtype),
        )
        mesh = init_device_mesh(self.device, (dist.get_world_size(),))
        for part in (*self.adapter.transformer_blocks(module), module):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard_after_forward)
        return module


class WeightedMetrics:
    """Averages of metrics over samples; names ending in /max keep the largest value."""

    def __init__(self) -> None:
        self.entries: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Numbers that stand for `weight` samples; with none they say nothing and are left out."""
        if weight:
            for name, value in metrics.items():
                self.entries[name].append((float(value), weight))

    def combined(self) -> dict[str, float]:
        """Name -> average or maximum."""
        return {
            name: max(value for value, _ in entries)
            if name.endswith("/max")
            else sum(value * weight for value, weight in entries) / sum(weight for _, weight in entries)
            for name, entries in self.entries.items()
        }


def _allocate_adam_state(optimizer: torch.optim.AdamW) -> None:
    """Give every parameter its moments now, as AdamW itself would at the first gradient.

    Some parameters never get one (the last joint block's text output leads nowhere); without this a checkpoint would
    lack their state, and a fresh optimiser, which has it for all, could not be loaded from it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


@contextmanager
def _adapters_off(module: Any) -> Iterator[None]:
    module.disable_adapters()
    try:
        yield
    finally:
        module.enable_adapters()
