# SPDX-License-Identifier: Apache-2.0
"""What the trainer computes of one micro-batch at one timestep: the policy's output, the others' for comparison, the
loss."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from models.algorithms.losses import (
    EMA_VELOCITY,
    IS_WEIGHTS,
    OLD_MEAN,
    OLD_VELOCITY,
    REF_MEAN,
    REF_VELOCITY,
    TEACHER_MEAN,
    TEACHER_VELOCITY,
    VELOCITIES,
    DiffusionLossFn,
    KLLoss,
    check_result,
    velocity_distance,
)
from models.config.exported import LORA_FILE
from models.families.base import UNCONDITIONAL, DiffusionModelBase, DiffusionModelConfig
from models.registry import WrongAnswer
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.training.engine import FIRST_RATIO
from models.training.micro_batches import COUNTED
from models.training.noised import add_noise
from models.training.weight_copies import WeightCopy
from models.weights.trainable import trainable

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig

STEPWISE_DATA = ("old_log_probs", OLD_MEAN, IS_WEIGHTS, "noise", "sigmas", *VELOCITIES)


class PolicyForward:
    """Forward passes of the policy and of what it is compared with; `DiffusersFSDPEngine` builds and trains it.

    Attributes:
        device: where all of it is.
        module: the policy.
        reference: a frozen copy of the starting weights; None where LoRA can be switched off instead, or is not asked
            for.
        teacher: the model to distil from, or None.
        old_policy: the copy of the trained weights that some losses of the forward process keep, or None.
        step_weights: [T], on the device, what the loss of each step of the schedule is multiplied by
            (`rectifying_weights`), or None.
    """

    device: str
    model_config: DiffusionModelConfig
    actor_config: "DiffusionActorConfig"
    adapter: type[DiffusionModelBase]
    loss_fn: DiffusionLossFn
    scheduler: FlowMatchSDEDiscreteScheduler
    module: nn.Module
    reference: nn.Module | None
    teacher: nn.Module | None
    old_policy: WeightCopy | None
    step_weights: Tensor | None = None

    def forward_step(
        self,
        micro_batch: TensorDict,
        loss_function: DiffusionLossFn | None,
        forward_only: bool = False,
        *,
        step: int = 0,
    ) -> tuple[Any, dict[str, Any]]:
        """One timestep of a micro-batch: a step replayed, or a finished sample noised to one level.

        Args:
            micro_batch: embeddings and advantages [B]. Of the reverse process latents [B, W+1, ...], timesteps [B, W],
                old_log_probs [B, W], and where they are needed old_prev_sample_mean [B, W, ...] and rollout_is_weights
                [B, W]. Of the forward process clean_latents [B, ...], noise [B, W, ...], sigmas [B, W] and the
                velocities [B, W, ...] that the loss compares with. The engine itself hands over one step at a time
                (W = 1), so a window may have gaps. With `counted` [B] all samples are computed, and those alone are in
                the loss and the metrics.
            loss_function: applied to the outputs; unused with `forward_only`.
            forward_only: no gradient, no loss.
            step: which of the W timesteps.

        Returns:
            (scalar loss, metrics), or with `forward_only` (model output of all samples, {}).
        """
        data = self._data_of(micro_batch, step)
        if forward_only:
            with torch.no_grad():
                return self._output(self.module, micro_batch, data, step, learning=True), {}
        assert loss_function is not None, "forward_step needs a loss_function unless forward_only"
        if loss_function.process == "reverse":
            data |= self._compared_means(loss_function, micro_batch, data, step)
        output = self._output(self.module, micro_batch, data, step, learning=True)
        output, data = (_counted(of_all, micro_batch.get(COUNTED)) for of_all in (output, data))
        name = self.actor_config.diffusion_loss.loss_mode
        loss_function.validate_inputs(loss_name=name, model_output=output, data=data)
        result = loss_function(config=self.actor_config, model_output=output, data=data)
        check_result(name, result)
        loss, metrics = result.loss, dict(result.metrics)
        metrics["loss" if result.add_loss_metric else "pg_loss"] = loss.detach()
        if "old_log_probs" in data:
            distance = (output["log_probs"].detach() - data["old_log_probs"]).abs()
            metrics |= {"logprob_abs_diff/mean": distance.mean(), "logprob_abs_diff/max": distance.max()}
            if "ratio_deviation/mean" in metrics:
                metrics[FIRST_RATIO] = metrics["ratio_deviation/mean"]
        if self.actor_config.use_kl_loss:
            kl = self._distance_to_reference(loss_function, output, data)
            loss = loss + self.actor_config.kl_loss_coef * kl
            metrics["kl_loss"] = kl.detach()
        if self.actor_config.matching_loss_coef and loss_function.process == "forward":
            matching = velocity_distance(output["velocity"], data["noise"] - data["clean_latents"])
            loss = loss + self.actor_config.matching_loss_coef * matching
            metrics["matching_loss"] = matching.detach()
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise WrongAnswer(
                f"actor_rollout_ref.actor.diffusion_loss.loss_mode is {name!r}, whose loss has no gradient: compute it "
                f"from the model's output ({', '.join(output)}) without detach()"
            )
        return loss, metrics

    @property
    def input_config(self) -> DiffusionModelConfig:
        """The model's, in whose number format an adapter casts what the family's pipeline casts, and no more: rounded
        by FSDP, which casts every input, a timestep would be another one than the rollout's. Of fp32 weights that
        compute in bf16 it is that format."""
        config, computes = self.model_config, self.actor_config.fsdp_config.param_dtype
        if (config.model.dtype, computes) != ("float32", "bfloat16"):
            return config
        return replace(config, model=config.model.model_copy(update={"dtype": computes}))

    def pass_through(self, inputs: dict[str, Any], negative: dict[str, Any] | None) -> Tensor:
        """The velocity [B, ...] as the update computes it, with gradient; a reference that is the same weights without
        LoRA has computed it, too."""
        constant = self.actor_config.guidance_gradient == "conditional"
        with torch.no_grad():
            half = self.adapter.denoise(self.module, negative) if constant and negative is not None else None
            refers = self.actor_config.use_kl_loss or {REF_MEAN, REF_VELOCITY} & {*self.loss_fn.required_data_keys}
            if refers and self.reference is None:
                with _adapters_off(self.module):
                    self.adapter.predict_velocity(self.module, self.model_config, inputs, negative)
        return self.adapter.predict_velocity(self.module, self.model_config, inputs, negative, half)

    def predicted(self, key: str, micro_batch: TensorDict) -> Tensor:
        """The velocity of one of `VELOCITIES` for a noised micro-batch of one level, [B, ...], without gradient.

        Every rank must be inside `holding_weights_of(key)`.
        """
        module = {REF_VELOCITY: self.reference, TEACHER_VELOCITY: self.teacher}.get(key) or self.module
        with torch.no_grad():
            return self._output(module, micro_batch, self._data_of(micro_batch, 0), 0)["velocity"]

    @contextmanager
    def holding_weights_of(self, key: str) -> Iterator[None]:
        """Context in which `predicted(key, ...)` speaks for the weights that the key names."""
        from_old = key == EMA_VELOCITY or (key == OLD_VELOCITY and self.loss_fn.samples_from_old_policy)
        if from_old:
            assert self.old_policy is not None
            with self.old_policy.applied():
                yield
        elif key == REF_VELOCITY and self.reference is None:
            with _adapters_off(self.module):
                yield
        else:
            yield

    def _data_of(self, micro_batch: TensorDict, step: int) -> dict[str, Tensor]:
        """What the losses may read, at one of the W timesteps."""
        given = {name: micro_batch.get(name) for name in STEPWISE_DATA}
        data = {name: tensor[:, step] for name, tensor in given.items() if tensor is not None}
        data["advantages"] = micro_batch["advantages"]
        if "clean_latents" in micro_batch:
            clean = data["clean_latents"] = micro_batch["clean_latents"]
            data["noisy_latents"] = add_noise(clean, data["noise"], data["sigmas"])
        elif self.step_weights is not None:
            steps, _ = self.scheduler.find_timesteps(micro_batch["timesteps"][:, step])
            weights = self.step_weights[steps]
            data[IS_WEIGHTS] = weights * data.get(IS_WEIGHTS, 1.0)
        return data

    def _output(
        self, module: nn.Module, micro_batch: TensorDict, data: dict[str, Tensor], step: int, learning: bool = False
    ) -> dict[str, Tensor]:
        """MODEL_OUTPUTS of the micro-batch's process; `learning` says that it is the loss's, or what it compares with,
        and so is computed in the same passes."""
        if "noisy_latents" in data:
            timesteps = data["sigmas"] * self.scheduler.config.num_train_timesteps
            inputs, negative = self.adapter.model_inputs(
                module, self.input_config, data["noisy_latents"], timesteps, micro_batch, step
            )
            half = self._fixed_half(micro_batch, negative, step) if learning else None
            return {"velocity": self.adapter.predict_velocity(module, self.model_config, inputs, negative, half)}
        inputs, negative = self.adapter.model_inputs(
            module, self.input_config, micro_batch["latents"], micro_batch["timesteps"], micro_batch, step
        )
        replayed: dict[str, Any] = {name: micro_batch[name] for name in ("latents", "timesteps")}
        replayed |= {f"all_{name}": replayed[name] for name in ("latents", "timesteps")}  # the reference system's names
        replayed[UNCONDITIONAL] = self._fixed_half(micro_batch, negative, step) if learning else None
        log_probs, mean, std_dev_t, *others = self.adapter.forward_and_sample_previous_step(
            module, self.scheduler, self.model_config, inputs, negative, replayed, step
        )  # the reference system's adapters give these three
        sqrt_dt = others[0] if others else self.scheduler.sqrt_dt(micro_batch["timesteps"][:, step])
        return {"log_probs": log_probs, "prev_sample_mean": mean, "std_dev_t": std_dev_t, "sqrt_dt": sqrt_dt}

    def _fixed_half(self, micro_batch: TensorDict, negative: dict[str, Any] | None, step: int) -> Tensor | None:
        """The half of the guidance that no gradient is to reach: the rollout's own where it comes with the samples."""
        if negative is None or self.actor_config.guidance_gradient == "both":
            return None
        recorded = micro_batch.get(UNCONDITIONAL)
        if recorded is not None:
            return recorded[:, step]
        with torch.no_grad():
            return self.adapter.denoise(self.module, negative)

    def _compared_means(
        self, loss_function: DiffusionLossFn, micro_batch: TensorDict, data: dict[str, Tensor], step: int
    ) -> dict[str, Tensor]:
        """Means of the same step under the starting weights (KL) and under the teacher, where they are asked for."""
        means = {}
        with torch.no_grad():
            if self.actor_config.use_kl_loss or REF_MEAN in loss_function.required_data_keys:
                with nullcontext() if self.reference is not None else _adapters_off(self.module):
                    module = self.reference or self.module
                    means[REF_MEAN] = self._output(module, micro_batch, data, step)["prev_sample_mean"]
            if self.teacher is not None:
                means[TEACHER_MEAN] = self._output(self.teacher, micro_batch, data, step)["prev_sample_mean"]
        return means

    def _distance_to_reference(
        self, loss_function: DiffusionLossFn, output: dict[str, Tensor], data: dict[str, Tensor]
    ) -> Tensor:
        if loss_function.process == "forward":
            return velocity_distance(output["velocity"], data[REF_VELOCITY])
        kl, _ = KLLoss.compute_loss(
            prev_sample_mean=output["prev_sample_mean"],
            ref_prev_sample_mean=data[REF_MEAN],
            std_dev_t=output["std_dev_t"],
            sqrt_dt=output["sqrt_dt"] if self.actor_config.kl_loss_type == "flow_grpo" else None,
        )
        return kl


def _counted(tensors: dict[str, Tensor], counted: Tensor | None) -> dict[str, Tensor]:
    """Tensors [B, ...] by name, of the samples that count."""
    return tensors if counted is None else {name: tensor[counted] for name, tensor in tensors.items()}


def load_teacher(adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, path: str) -> nn.Module:
    """The teacher, frozen: of a folder in diffusers format, or the base model with LoRA weights that a run exported."""
    folder = Path(path)
    if (folder / LORA_FILE).is_file():
        module: Any = adapter.load_transformer(model_config, model_config.dtype)
        module.load_lora_adapter(folder, weight_name=LORA_FILE, prefix="transformer")
    else:
        module = adapter.load_transformer(model_config.of_folder(path), model_config.dtype)
    return module.requires_grad_(False)


@contextmanager
def _adapters_off(module: Any) -> Iterator[None]:
    """Within the block the module computes with its base weights; what is trained stays so.

    peft takes requires_grad from the LoRA weights while they are off, and gives it back to those that are registered by
    then. Under FSDP these may be gathered copies, and the shards would be frozen from then on.
    """
    trained = list(trainable(module).values())
    module.disable_adapters()
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        module.enable_adapters()
