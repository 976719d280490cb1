"""The training engine: a diffusers transformer under FSDP2, trained by replaying rollouts step by step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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

from models.algorithms.losses import IS_WEIGHTS, OLD_MEAN, DiffusionLossFn, KLLoss, get_diffusion_loss_fn
from models.base import DiffusionModelBase, DiffusionModelConfig
from models.engines.actor_batch import ActorBatch, WeightedMetrics, counted_rows
from models.engines.canary import Canary, canary_velocity
from models.engines.ema import WeightAverage
from models.engines.trajectories import Trajectories
from models.engines.weights import make_trainable, trainable

if TYPE_CHECKING:
    from models.config import DiffusionActorConfig

STEPWISE_DATA = ("old_log_probs", OLD_MEAN, IS_WEIGHTS)
LOG_PROB_DISTANCES = ("logprob_abs_diff/mean", "logprob_abs_diff/max")


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
            Metrics without prefix, averaged over this rank's counted samples, timesteps and optimiser steps;
            logprob_abs_diff/* are of the first step alone, where the weights are still those that sampled.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are then untouched by it.
        """
        collected = WeightedMetrics()
        self.module.train()
        for number, batch in enumerate(batches):
            self._accumulate_gradients(batch, collected, first=number == 0)
            collected.add({"lr": float(self.lr_scheduler.get_last_lr()[0]), "grad_norm": self._optimizer_step()})
        self.module.eval()
        return collected.combined() | {"optimizer_steps": self.optimizer_steps}

    def _accumulate_gradients(self, batch: ActorBatch, collected: WeightedMetrics, first: bool) -> None:
        pieces = batch.micro_batches(self.actor_config.ppo_micro_batch_size_per_gpu)
        for number, (trajectories, advantages) in enumerate(pieces):
            steps, on_device = len(trajectories.window), trajectories.to(self.device)
            for step in range(steps):
                micro_batch, counted = self._micro_batch(on_device.step(step), advantages)
                # A rank averages over its own samples and FSDP over ranks; this turns both into one mean over the
                # mini-batch's counted samples and timesteps.
                scale = counted * dist.get_world_size() / (batch.global_count * steps)
                last = number == len(pieces) - 1 and step == steps - 1
                cast(FSDPModule, self.module).set_requires_gradient_sync(last)
                loss, metrics = self.forward_step(micro_batch, self.loss_fn)
                (loss * scale).backward()
                distances = {name: metrics.pop(name) for name in LOG_PROB_DISTANCES}
                collected.add(metrics | distances if first else metrics, counted)

    def _micro_batch(self, trajectories: Trajectories, advantages: Tensor) -> tuple[TensorDict, int]:
        """Inputs of one micro-batch, for a window of one step on this device, and how many of its samples count.

        With none left, one sample is computed and weighted 0: every rank must take part in the collectives.
        """
        kept = counted_rows(trajectories, advantages)
        rows = kept if len(kept) else torch.zeros(1, dtype=torch.long)
        trajectories = trajectories.rows(rows)
        weights = trajectories.is_weights
        tensors = {
            "latents": trajectories.latents,
            "timesteps": trajectories.timesteps,
            "old_log_probs": trajectories.log_probs,
            OLD_MEAN: trajectories.means,
            IS_WEIGHTS: None if weights is None else weights.nan_to_num(0.0),
            "advantages": advantages[rows].nan_to_num(0.0).to(self.device),
            **trajectories.prompts.expand(trajectories.prompt_index),
            **trajectories.prompts.expand_extras(trajectories.prompt_index),
        }
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return TensorDict(present, batch_size=[len(rows)]), len(kept)

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
            micro_batch: latents [B, W+1, ...], timesteps [B, W], embeddings, old_log_probs [B, W], advantages [B];
                where they are needed old_prev_sample_mean [B, W, ...] and rollout_is_weights [B, W]. The engine itself
                hands over one step at a time (W = 1), so a window may have gaps.
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
        given = {name: micro_batch.get(name) for name in STEPWISE_DATA}
        data = {name: tensor[:, step] for name, tensor in given.items() if tensor is not None}
        data["advantages"] = micro_batch["advantages"]
        if self.actor_config.use_kl_loss:
            data["ref_prev_sample_mean"] = self._reference_mean(micro_batch, step)
        output = self._replay(self.module, micro_batch, step)
        name = self.actor_config.diffusion_loss.loss_mode
        loss_function.validate_inputs(loss_name=name, model_output=output, data=data)
        result = loss_function(config=self.actor_config, model_output=output, data=data)
        loss, metrics = result.loss, dict(result.metrics)
        metrics["pg_loss"] = loss.detach()
        distance = (output["log_probs"].detach() - data["old_log_probs"]).abs()
        metrics |= dict(zip(LOG_PROB_DISTANCES, (distance.mean(), distance.max()), strict=True))
        if self.actor_config.use_kl_loss:
            kl, kl_metrics = KLLoss.compute_loss(
                prev_sample_mean=output["prev_sample_mean"],
                ref_prev_sample_mean=data["ref_prev_sample_mean"],
                std_dev_t=output["std_dev_t"],
            )
            loss = loss + self.actor_config.kl_loss_coef * kl
            metrics |= kl_metrics
        return loss, metrics

    def rescored(self, trajectories: Trajectories, with_means: bool = False) -> Trajectories:
        """The same samples with `log_probs`, and if asked `means`, under the present weights."""
        names = {"log_probs": "log_probs"} | ({"means": "prev_sample_mean"} if with_means else {})
        batch = ActorBatch([(trajectories, torch.zeros(len(trajectories)))], len(trajectories))
        pieces: list[dict[str, Tensor]] = []
        for piece, zeros in batch.micro_batches(self.actor_config.ppo_micro_batch_size_per_gpu):
            steps, on_device = [], piece.to(self.device)
            for step in range(len(piece.window)):
                micro_batch, _ = self._micro_batch(on_device.step(step), zeros)
                output, _ = self.forward_step(micro_batch, None, forward_only=True)
                steps.append({field: output[name].cpu() for field, name in names.items()})
            pieces.append({field: torch.stack([one[field] for one in steps], 1) for field in names})
        scored = {field: torch.cat([piece[field] for piece in pieces]) for field in names}
        return replace(trajectories, log_probs=scored["log_probs"], means=scored.get("means"))

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
        settings, own = self.actor_config.fsdp_config, self.model_config.model.dtype
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, settings.param_dtype or own),
            reduce_dtype=getattr(torch, settings.reduce_dtype),
            # The adapter casts what the family's pipeline casts. Timesteps and rotary angles are not among it: rounded
            # here, the trainer would see another timestep than the rollout.
            cast_forward_inputs=settings.param_dtype not in (None, own),
        )
        # Frozen weights that diffusers keeps in fp32 in a bf16 model stay so, whole on every rank: they are few, and
        # rounded here they would make another model than the rollout's.
        kept = {p for p in module.parameters() if not p.requires_grad and p.dtype != getattr(torch, own)}
        mesh = init_device_mesh(self.device, (dist.get_world_size(),))
        for part in (*self.adapter.transformer_blocks(module), module):
            fully_shard(
                part,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=settings.reshard_after_forward,
                ignored_params=kept,
            )
        return module


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
