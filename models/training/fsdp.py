# SPDX-License-Identifier: Apache-2.0
"""The training engine: a diffusers transformer under FSDP2, trained step by step on what the rollout sampled."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from models.algorithms.losses import REF_VELOCITY, get_diffusion_loss_fn
from models.algorithms.old_policy import old_policy_decay
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.runtime.attention import choose_attention
from models.runtime.compiled import compile_blocks
from models.runtime.float8 import scales_in
from models.runtime.products import choose_products
from models.runtime.recomputation import recomputed
from models.samples.trajectories import Trajectories
from models.schedulers.gradient_scale import rectifying_weights
from models.training.adamw import LocalAdamW, adam_state_on_device, allocate_adam_state, offload_adam_state
from models.training.checkpoint import EngineCheckpoint
from models.training.engine import LOG_PROB_DISTANCES, TRAINING_ENGINES, HeldWeights
from models.training.forward_batches import noised_batch
from models.training.gradients import NonfiniteSteps, average_whole, clip_gradients
from models.training.micro_batches import ActorBatch, UpdateRecord, WeightedMetrics, micro_batches_of
from models.training.noised import NoisedLatents
from models.training.policy import PolicyForward, load_teacher
from models.training.schedules import build_lr_scheduler
from models.training.sequence_parallel import sequence_mesh, split_sequences
from models.training.shards import TrainedShards
from models.training.weight_copies import WeightAverage, WeightCopy
from models.training.whole_weights import whole_weights
from models.weights.canary import Canary, canary_batch, canary_velocity
from models.weights.stored import is_stored_in
from models.weights.trainable import (
    keep_formats,
    kept_in_fp32,
    load_exported,
    make_trainable,
    trainable,
    widen_trained,
)

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig, ForwardProcessConfig


@TRAINING_ENGINES.register("fsdp2")
class DiffusersFSDPEngine(PolicyForward):
    """One rank of the trainer under FSDP2; arguments and contract are `TrainingEngine`'s."""

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        actor_config: "DiffusionActorConfig",
        device: str = "cpu",
        forward_config: "ForwardProcessConfig | None" = None,
        keeps_previous: bool = False,
        max_nonfinite_steps: int = 0,
    ):
        self.model_config, self.actor_config, self.device = model_config, actor_config, device
        self.adapter = DiffusionModelBase.get_class(model_config)
        self.loss_fn = get_diffusion_loss_fn(actor_config.diffusion_loss.loss_mode, actor_config.diffusion_loss.options)
        self._forward_config, self._keeps_previous = forward_config, keeps_previous
        self.checkpoint = EngineCheckpoint(self)
        self.optimizer_steps = self.updates = 0
        self.nonfinite = NonfiniteSteps(max_nonfinite_steps)
        self._begun: UpdateRecord | None = None

    def initialize(self) -> None:
        """Load, freeze, shard; then optimiser, schedule, copies of the weights, reference and teacher."""
        sharing = self.actor_config.fsdp_config.ulysses_sequence_parallel_size
        self._sequence_mesh = sequence_mesh(self.device, sharing) if sharing > 1 else None
        # Nothing in these models depends on the mode but that compiled code is made anew for each.
        self.module = self._sharded(self._load(trained=True)).eval()
        if not self.actor_config.fsdp_config.reshard_after_forward:
            # Weights that stay gathered from a forward to its backward stay so until they change: `held` lets go.
            cast(FSDPModule, self.module).set_reshard_after_backward(False)
        self._trained = TrainedShards(self.module)
        self.optimizer = self._new_optimizer()
        allocate_adam_state(self.optimizer)
        if self.actor_config.fsdp_config.optimizer_offload:
            offload_adam_state(self.optimizer)
        self.lr_scheduler = build_lr_scheduler(self.optimizer, self.actor_config.optim)
        self.ema = WeightAverage(self._trained, self.actor_config.ema) if self.actor_config.ema.enable else None
        self.scheduler = self.adapter.build_scheduler(self.model_config)
        self.adapter.set_timesteps(self.scheduler, self.model_config, self.device)
        rectifies = self.actor_config.diffusion_loss.temporal_gradient_rectification
        algo = self.model_config.algo
        self.step_weights = rectifying_weights(self.scheduler, algo).to(self.device) if rectifies else None
        self.old_policy = WeightCopy(self._trained) if self.loss_fn.keeps_old_policy() else None
        self.previous = WeightCopy(self._trained) if self._keeps_previous else None
        refers = self.actor_config.use_kl_loss or REF_VELOCITY in self.loss_fn.required_data_keys
        full = not self.model_config.trains_lora
        self.reference = self._sharded(self._load(trained=False)).eval() if refers and full else None
        self.teacher = self._load_teacher()

    def warm_up(self, canary: Canary) -> None:
        """Have compiled what an update of so many samples computes, by a backward pass whose gradients are dropped.

        Every rank makes this call. Weights, optimiser and random state stay as they are.
        """
        prompts, index, latents = canary_batch(self.adapter, self.model_config, canary, self.device)
        timesteps = self.scheduler.timesteps[:1].to(self.device).expand(len(index))
        text = prompts.expand(index)
        inputs = self.adapter.model_inputs(self.module, self.input_config, latents, timesteps, text)
        self._trained.reduce_gradients(True)
        self.pass_through(*inputs).float().mean().backward()
        self.optimizer.zero_grad()

    # ---- the update

    def update_policy(self, batches: Sequence[ActorBatch], epochs: int = 1) -> dict[str, float]:
        """One optimiser step per batch, `epochs` times over.

        Returns:
            Metrics without prefix, averaged over this rank's counted samples, timesteps and optimiser steps.
            `LOG_PROB_DISTANCES` are of the first step alone, before the weights move. Beside them counts:
            `sample_steps`, the samples times timesteps that were computed (`recorded_steps`: those whose half of the
            guidance without the prompt was not), `first_sample_steps`, those of the first step, and
            `nonfinite_sample_steps`, those of the `nonfinite_steps` optimiser steps that were left out and are in no
            average.

        Raises:
            GradientNotFinite: a gradient is not finite, and more steps in a row are not than may be left out; the
                weights are untouched by it.
        """
        record, self._begun = self._record_of_update(), None
        prepared = [self._prepared(batch) for batch in batches]
        for batch in prepared * epochs:
            self._take_step(batch, record)
        self._move_old_policy()
        self._release_memory()
        return record.combined() | {"optimizer_steps": self.optimizer_steps}

    def step_early(self, batch: ActorBatch) -> None:
        """Take an optimiser step of an update before its other batches are there; `update_policy` goes on with them.

        Together they compute what `update_policy` does of all batches in one call, once over, and its metrics are of
        all. Losses of the forward process cannot be trained so: what they compare with is of before the first step.

        Raises:
            GradientNotFinite: see `update_policy`.
        """
        assert self.loss_fn.process == "reverse", "a loss of the forward process takes all batches of an update at once"
        record, self._begun = self._record_of_update(), None  # nothing goes on with one of which a step has failed
        self._take_step(self._prepared(batch), record)
        self._begun = record

    def _record_of_update(self) -> UpdateRecord:
        """Of the update that is under way, or of one that begins now."""
        if self._begun is not None:
            return self._begun
        if self.previous is not None:
            self.previous.follow(0)
        return UpdateRecord()

    def _take_step(self, batch: ActorBatch[Trajectories | NoisedLatents], record: UpdateRecord) -> None:
        if not batch.global_count:  # 0 on every rank: no group has a pair left
            return
        of_step, first = WeightedMetrics(), record.steps == 0
        trained = self._accumulate_gradients(batch, of_step, first)
        record.steps += 1
        record.counted += trained
        if first:
            record.first_counted = trained
            record.recorded = trained if batch.records_unconditional else 0
        rate, norm = float(self.lr_scheduler.get_last_lr()[0]), self._optimizer_step()
        if norm is None:
            record.left_out += 1
            record.left_out_counted += trained
            return
        record.metrics.join(of_step)
        record.metrics.add({"lr": rate, "grad_norm": norm})

    def _prepared(self, batch: ActorBatch) -> ActorBatch[Trajectories | NoisedLatents]:
        """Its micro-batches, before the first optimiser step: what is compared with belongs to the weights of now."""
        size = self.actor_config.micro_batch
        if self.loss_fn.process == "reverse":
            for samples, _ in batch.parts:
                self.scheduler.check_timesteps(samples.timesteps)
            return batch.cut(size)
        assert self._forward_config, "a loss of the forward process needs the engine's forward_config"
        return noised_batch(self, batch, self._forward_config, size)

    def _accumulate_gradients(
        self, batch: ActorBatch[Trajectories | NoisedLatents], collected: WeightedMetrics, first: bool
    ) -> int:
        """How many samples times timesteps counted."""
        total = 0
        for number, (samples, advantages) in enumerate(batch.parts):
            if not first and isinstance(samples, Trajectories):  # the weights that the rollout sampled with are gone
                samples = replace(samples, unconditional=None)
            together = self.actor_config.levels_per_pass
            passes = micro_batches_of(samples.to(self.device), advantages, together, self.device)
            for micro_batch, counted, is_last in passes:
                # A rank averages over its own samples and FSDP over ranks; this turns both into one mean over the
                # mini-batch's counted samples and timesteps. Of ranks that share their samples each has the gradient of
                # its own tokens: there FSDP's sum is what is wanted.
                scale = counted * dist.get_world_size() / (batch.global_count * samples.steps)
                ends_step = number == len(batch.parts) - 1 and is_last
                self._trained.reduce_gradients(ends_step or self.actor_config.fsdp_config.shard_gradients)
                loss, metrics = self.forward_step(micro_batch, self.loss_fn)
                (loss * scale).backward()
                distances = {name: metrics.pop(name) for name in LOG_PROB_DISTANCES if name in metrics}
                collected.add(metrics | distances if first else metrics, counted)
                total += counted
        return total

    def _move_old_policy(self) -> None:
        """Once an iteration, after its optimiser steps."""
        self.updates += 1
        config = self._forward_config
        if self.old_policy and config and self.updates % config.old_policy_update_interval == 0:
            self.old_policy.follow(old_policy_decay(self.optimizer_steps, config))

    def _release_memory(self) -> None:
        """Where the trainer keeps its state in host memory, others may use what it took of the GPU for the update."""
        settings = self.actor_config.fsdp_config
        if self.device == "cuda" and (settings.param_offload or settings.optimizer_offload):
            torch.cuda.empty_cache()

    # ---- the trainer's own log-probs

    def rescored(self, trajectories: Trajectories, with_means: bool = False) -> Trajectories:
        """The same samples with `log_probs`, and if asked `means`, under the present weights."""
        self.scheduler.check_timesteps(trajectories.timesteps)
        names = {"log_probs": "log_probs"} | ({"means": "prev_sample_mean"} if with_means else {})
        batch = ActorBatch([(trajectories, torch.zeros(len(trajectories)))], len(trajectories))
        pieces: list[dict[str, Tensor]] = []
        for piece, zeros in batch.cut(self.actor_config.micro_batch).parts:
            steps: dict[str, list[Tensor]] = {field: [] for field in names}
            together = self.actor_config.levels_per_pass
            for micro_batch, _, _ in micro_batches_of(piece.to(self.device), zeros, together, self.device):
                output, _ = self.forward_step(micro_batch, None, forward_only=True)
                for field, name in names.items():
                    steps[field] += output[name].cpu().split(len(piece))
            pieces.append({field: torch.stack(found, 1) for field, found in steps.items()})
        scored = {field: torch.cat([piece[field] for piece in pieces]) for field in names}
        return replace(trajectories, log_probs=scored["log_probs"], means=scored.get("means"))

    def _optimizer_step(self) -> float | None:
        """The gradient's norm before it was clipped; None where it is not finite and the step was left out."""
        norm = self._clip_gradient().item()  # the one place of a step that waits for the GPU
        if not math.isfinite(norm):  # it is over all ranks, so they agree
            self.optimizer.zero_grad()
            self.nonfinite.leave_out(norm, self.optimizer_steps)
            return None
        self.nonfinite.in_a_row = 0
        offloaded = self.actor_config.fsdp_config.optimizer_offload
        with adam_state_on_device(self.optimizer) if offloaded else nullcontext():
            self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.optimizer_steps += 1
        if self.ema is not None:
            self.ema.update(self.optimizer_steps)
        return norm

    def _clip_gradient(self) -> Tensor:
        """Make the gradient that of all ranks and no longer than `optim.clip_grad`; its norm before (scalar)."""
        parameters = list(self._trained.held().values())
        average_whole(parameters)
        return clip_gradients(parameters, self.actor_config.optim.clip_grad)

    # ---- weights

    def holding(self, which: HeldWeights) -> AbstractContextManager[None]:
        """Context in which the engine's weights are its own, or one of the copies that `HeldWeights` names.

        Raises:
            ValueError: the config keeps no such weights.
        """
        if which == "policy":
            return nullcontext()
        copy = {"average": self.ema, "old": self.old_policy, "previous": self.previous}[which]
        if copy is None:
            raise ValueError(
                f"the trainer keeps no {which} weights: actor.ema.enable, the loss and trainer.one_step_off_policy "
                "decide which it has"
            )
        return copy.applied()

    def gather_weights(self) -> dict[str, Tensor]:
        """The trained weights by name, each of its whole shape, on the CPU; on rank 0 (empty on the others)."""
        gathered = {}
        for name, whole in whole_weights(self._trained.held()):
            if dist.get_rank() == 0:
                gathered[name] = whole.to("cpu", copy=True)
        return gathered

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of the trained weights one by one, in whole shape on the device: LoRA's in fp32, all weights
        in the format in which a rollout holds them. Every rank must take all."""
        config = self.model_config
        kept = None if config.trains_lora else kept_in_fp32(self.module)
        for name, weight in whole_weights(self._trained.held()):
            held = weight.dtype if kept is None or name in kept else config.dtype
            yield name, weight.to(self.device, held)

    def canary_velocity(self, canary: Canary) -> Tensor:
        """What the trainer's model predicts for the canary, [S, n, ...] fp32 on the CPU (`canary_velocity`)."""
        return canary_velocity(self.adapter, self.module, self.input_config, canary, self.device)

    # ---- checkpoint

    def save_checkpoint(self, folder: Path) -> None:
        """Write policy, its copies, optimiser, schedule and random state, sharded, for any number of ranks to read."""
        self.checkpoint.save(folder)

    def start_saving(self, folder: Path) -> None:
        """The same from a copy in host memory, in the background."""
        self.checkpoint.start_saving(folder)

    def saving_finished(self) -> bool:
        """Has what `start_saving` began been written? An error of the writing is raised here, once."""
        return self.checkpoint.finished()

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what a save wrote, in place."""
        self._begun = None
        self.checkpoint.load(folder)

    # ---- building

    def _new_optimizer(self) -> torch.optim.AdamW:
        """AdamW over the trained shards; on a GPU in one kernel, as several take as much memory again as a moment."""
        settings = self.actor_config.optim
        on_gpu = self.device == "cuda" and not self.actor_config.fsdp_config.param_offload
        return LocalAdamW(
            list(self._trained.held().values()),
            fused=on_gpu or None,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def _load(self, trained: bool) -> nn.Module:
        full = trained and not self.model_config.trains_lora
        dtype = torch.float32 if full and self._is_rounded_by_its_format() else self.model_config.dtype
        module: Any = self.adapter.load_transformer(self.model_config, dtype)
        keep_formats(module, self.model_config.dtype)
        if trained:
            make_trainable(self.adapter, module, self.model_config)
            if self.model_config.model.initial_weights is not None:
                load_exported(self.adapter, module, self.model_config, Path(self.model_config.model.initial_weights))
            if self.actor_config.fsdp_config.gradient_checkpointing:
                # FSDP's calls around a block would not see that its gradients come from a backward pass of their own.
                # Where weights before the blocks learn, too, their gradients would be summed up in another order.
                by_node = self._shares_in_one_group and self.model_config.trains_lora
                module.enable_gradient_checkpointing(recomputed if by_node else None)
            choose_products(self.adapter, module, self.model_config, self.device)
        else:
            module.requires_grad_(False)
        if self.model_config.model.compile:
            compile_blocks(self.adapter, module)
        return module

    def _is_rounded_by_its_format(self) -> bool:
        """Would weights lose digits in the model's format, as files in fp32 do in bf16? Else they are read as they are
        stored, in memory that all ranks share, and each block is widened when it is sharded."""
        config = self.model_config
        stored = Path(config.path) / config.transformer_subfolder
        return config.model.initial_weights is not None or not is_stored_in(stored, config.dtype)

    def _load_teacher(self) -> nn.Module | None:
        if self.actor_config.teacher_path is None:
            return None
        teacher = load_teacher(self.adapter, self.model_config, self.actor_config.teacher_path)
        return self._sharded(teacher).eval()

    def _sharded(self, module: nn.Module) -> nn.Module:
        choose_attention(self.adapter, module, self.device, getattr(torch, self._policy_format))
        if self._sequence_mesh is not None:
            split_sequences(self.adapter, module, self._sequence_mesh)
        return self._shard(module)

    @property
    def _policy_format(self) -> str:
        """The number format in which the model computes."""
        return self.actor_config.fsdp_config.param_dtype or self.model_config.model.dtype

    @property
    def _widens(self) -> bool:
        """Does it compute in a wider format than the rollout? Then FSDP casts what the adapter gives, which has the
        rollout's rounding; else the adapter alone casts, see `input_config`."""
        return self._policy_format == "float32" != self.model_config.model.dtype

    @property
    def _keeps_frozen_whole(self) -> bool:
        """Are LoRA's weights all that the ranks share?"""
        actor, config = self.actor_config, self.model_config
        return config.trains_lora and actor.keeps_frozen_whole(dist.get_world_size(), config.model.dtype)

    @property
    def _shares_in_one_group(self) -> bool:
        """Is the whole model FSDP's one group, and no block by itself?"""
        config = self.model_config
        return self.actor_config.shares_in_one_group(dist.get_world_size(), config.model.dtype, config.trains_lora)

    def _shard(self, module: nn.Module) -> nn.Module:
        """Divide a whole module in host memory among the ranks' devices, block by block or in one group."""
        settings, own, policy_format = self.actor_config.fsdp_config, self.model_config.model.dtype, self._policy_format
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, policy_format),
            reduce_dtype=getattr(torch, settings.reduce_dtype),
            cast_forward_inputs=self._widens,
        )
        # Weights that diffusers keeps in fp32 in a bf16 model stay so, whole on every rank: they are few, and rounded
        # here they would make another model than the rollout's. FSDP computes with one format a block.
        whole = self._keeps_frozen_whole
        frozen = (p for p in module.parameters() if not p.requires_grad)  # a list would keep all of them, whole
        kept = {p for p in frozen if whole or p.dtype != getattr(torch, own)} | scales_in(module)
        if own == policy_format == "bfloat16":
            in_fp32 = kept_in_fp32(module)
            kept |= {p for name, p in trainable(module).items() if name in in_fp32}
        offload = CPUOffloadPolicy(pin_memory=self.device == "cuda") if settings.param_offload else OffloadPolicy()
        mesh = init_device_mesh(self.device, (dist.get_world_size(),))
        blocks = () if self._shares_in_one_group else self.adapter.transformer_blocks(module)
        for part in (*blocks, module):
            widen_trained(part)
            fully_shard(
                part,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=settings.reshard_after_forward,
                ignored_params=kept,
            )
        for parameter in kept:  # the others went to the device block by block, and there is never more than one whole
            parameter.data = parameter.data.to(self.device)
        return module
