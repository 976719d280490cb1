# SPDX-License-Identifier: Apache-2.0
"""Losses: what an update minimises, computed where the gradients are.

A loss is split in two. `compute_loss` is the formula on plain tensors. `__call__` takes what it needs from the
model's output and the micro-batch, and says beforehand which keys those are, so that a missing input is an error
with a name and not a KeyError in the middle of a step.

A loss of the *reverse* process replays the sampler's own steps and compares log-probs (`policy_gradient`,
`distillation`); one of the *forward* process noises finished samples again and compares velocities (`preference`,
`forward_process`, `distillation`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from models.registry import NameRegistry, WrongAnswer, check_call, check_options
from models.schedulers.kernels import mean_dims

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig

Process = Literal["reverse", "forward"]
MODEL_OUTPUTS: dict[Process, tuple[str, ...]] = {
    "reverse": ("log_probs", "prev_sample_mean", "std_dev_t", "sqrt_dt"),
    "forward": ("velocity",),
}
"""What a forward pass gives: replaying a step (`DiffusionModelBase.forward_and_sample_previous_step`), or the velocity
of a noised sample."""
OLD_MEAN = "old_prev_sample_mean"
REF_MEAN = "ref_prev_sample_mean"
TEACHER_MEAN = "teacher_prev_sample_mean"
IS_WEIGHTS = "rollout_is_weights"
OLD_VELOCITY = "old_velocity"
EMA_VELOCITY = "ema_velocity"
REF_VELOCITY = "ref_velocity"
TEACHER_VELOCITY = "teacher_velocity"
VELOCITIES = (OLD_VELOCITY, EMA_VELOCITY, REF_VELOCITY, TEACHER_VELOCITY)
"""Predictions for the same noised samples: by the weights that sampled, by the slowly moving copy of the policy, by the
starting weights and by the teacher. All are computed before an iteration's first optimiser step."""
DATA: dict[Process, tuple[str, ...]] = {
    "reverse": ("old_log_probs", "advantages", OLD_MEAN),
    "forward": ("advantages", "clean_latents", "noise", "noisy_latents", "sigmas", *VELOCITIES[:3]),
}
"""What the engine gives any loss that asks for it."""
TEACHER_DATA: dict[Process, str] = {"reverse": TEACHER_MEAN, "forward": TEACHER_VELOCITY}
TRAINER_TYPES: dict[Process, str] = {"reverse": "policy_gradient", "forward": "direct_preference"}
"""The reference system's names of the two processes, `algorithm.trainer_type`."""


@dataclass
class DiffusionLossResult:
    """What a loss gives back.

    Attributes:
        loss: scalar, with gradient.
        metrics: name -> number, without the `actor/` prefix.
        add_loss_metric: also log the loss itself.
    """

    loss: Tensor
    metrics: dict[str, Any] = field(default_factory=dict)
    add_loss_metric: bool = False


class DiffusionLossFn(ABC):
    """Base of the worker-side losses."""

    process: ClassVar[Process] = "reverse"
    """Does it replay the sampler's steps, or noise finished samples again?"""
    paired: ClassVar[bool] = False
    """Are rows 2i and 2i+1 of its micro-batches the better and the worse sample of one prompt, noised alike?"""
    samples_from_old_policy: ClassVar[bool] = False
    """Are the rollout's weights the old policy's (`algorithm.old_policy_decay_schedule`) and not the policy's own?"""
    required_model_output_keys: ClassVar[tuple[str, ...]] = ()
    """Of MODEL_OUTPUTS."""
    required_data_keys: ClassVar[tuple[str, ...]] = ()
    """Of DATA, REF_MEAN where the KL to the reference is in use, and TEACHER_DATA where there is a teacher."""
    optional_data_keys: ClassVar[tuple[str, ...]] = ()
    """IS_WEIGHTS where the loss multiplies each sample by it; the key is there when rollout correction makes it."""

    compute_loss: ClassVar[Callable[..., tuple[Tensor, dict[str, Any]]]]
    """The formula, a classmethod: tensors in by name, (scalar loss, metrics) out."""

    @abstractmethod
    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        """The formula applied to one micro-batch at one timestep."""

    @staticmethod
    def prepare_actor_batch(batch: Any, reward_tensor: Tensor, config: Any) -> Any:
        """Hook of the forward process before the update: which finished samples are trained on, and in which order.

        Reverse-process losses are not asked: their batches are replayed as they were sampled.

        Args:
            batch: `models.samples.trajectories.FinishedLatents`.
            reward_tensor: [B], the advantages; NaN where a sample is left out.
            config: the actor's settings.

        Returns:
            A FinishedLatents with its advantages set; here every sample that has one.
        """
        return batch.scored((~reward_tensor.isnan()).nonzero().flatten(), reward_tensor)

    @classmethod
    def learns_from_rewards(cls) -> bool:
        """Does it read advantages, or choose its samples by them? Distillation does not."""
        return "advantages" in cls.required_data_keys or cls.paired

    @classmethod
    def keeps_old_policy(cls) -> bool:
        """Does the trainer hold a second, slower copy of the trained weights for it?"""
        return cls.samples_from_old_policy or EMA_VELOCITY in cls.required_data_keys

    def validate_inputs(self, *, loss_name: str, model_output: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Check the keys this loss declared.

        Raises:
            ValueError: names the loss and every missing key.
        """
        missing = [f"model output {key!r}" for key in self.required_model_output_keys if key not in model_output]
        missing += [f"data {key!r}" for key in self.required_data_keys if key not in data]
        if missing:
            raise ValueError(f"loss {loss_name!r} needs {', '.join(missing)}, which the update was not given")


_FIELD = "actor_rollout_ref.actor.diffusion_loss"
_LOSSES: NameRegistry[type[DiffusionLossFn]] = NameRegistry("loss", f"{_FIELD}.loss_mode")


def register_diffusion_loss(name: str) -> Callable[[type[DiffusionLossFn]], type[DiffusionLossFn]]:
    """Class decorator that makes a loss selectable as `diffusion_loss.loss_mode`."""
    return _LOSSES.register(name)


def get_diffusion_loss_fn(name: str, options: Mapping[str, Any] | None = None) -> DiffusionLossFn:
    """An instance of the loss of that name, or at that import path.

    Args:
        options: keyword arguments of its class, `diffusion_loss.options`.

    Raises:
        ValueError: unknown, the message lists the known names; no loss; an option that the class does not take; or a
            call that does not take what the engine gives.
    """
    found, options = _LOSSES.get(name), options or {}
    if not (isinstance(found, type) and issubclass(found, DiffusionLossFn)):
        raise ValueError(f"{_FIELD}.loss_mode is {name!r}, which is no subclass of DiffusionLossFn: name one that is")
    check_options(f"{_FIELD}.options", f"loss {name!r}", found, options, given=())
    loss = found(**options)
    check_call(f"{_FIELD}.loss_mode is {name!r}, which", loss, (), ("config", "model_output", "data"))
    return loss


def check_result(name: str, result: Any) -> None:
    """Is what a loss gave back one number to minimise, and a number for each metric?

    Args:
        name: of the loss, or its import path.
        result: what its call returned.

    Raises:
        WrongAnswer: it is no DiffusionLossResult, or one with other values.
    """
    what = f"{_FIELD}.loss_mode is {name!r}, which returned"
    if not isinstance(result, DiffusionLossResult):
        raise WrongAnswer(f"{what} a {type(result).__name__}: return a DiffusionLossResult(loss, metrics)")
    if not isinstance(result.loss, Tensor) or result.loss.numel() != 1:
        raise WrongAnswer(
            f"{what} a loss that is {_described(result.loss)}: return the mean over the samples, a scalar"
        )
    for metric, value in result.metrics.items():
        if (value.numel() != 1) if isinstance(value, Tensor) else not isinstance(value, Real):
            raise WrongAnswer(f"{what} a metric {metric!r} that is {_described(value)}: return one number")


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_loss_inputs(
    name: str,
    use_kl_loss: bool,
    weighted: bool = False,
    teacher: bool = False,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Check before any model loads that the engine can give a loss what it declares.

    Args:
        name: of the loss, or its import path.
        use_kl_loss: is there a reference?
        weighted: will samples have importance weights?
        teacher: is there one?
        options: keyword arguments of its class.

    Raises:
        ValueError: unknown loss or option, a loss that asks for something else (every such key is named), one that
            would ignore the weights, or a teacher that is missing or of no use.
    """
    loss = get_diffusion_loss_fn(name, options)
    given, outputs = {*DATA[loss.process]}, MODEL_OUTPUTS[loss.process]
    if use_kl_loss:
        given.add(REF_MEAN if loss.process == "reverse" else REF_VELOCITY)
    wants_teacher = TEACHER_DATA[loss.process] in loss.required_data_keys
    if wants_teacher != teacher:
        problem = "needs a teacher: set" if wants_teacher else "has no use for a teacher: leave out"
        raise ValueError(f"diffusion_loss.loss_mode {name!r} {problem} actor.teacher_path")
    wrong = [key for key in loss.required_model_output_keys if key not in outputs]
    wrong += [key for key in loss.required_data_keys if key not in {*given, TEACHER_DATA[loss.process]}]
    if wrong:
        known = ", ".join([*outputs, *sorted(given)])
        raise ValueError(f"diffusion_loss.loss_mode {name!r} needs {', '.join(wrong)}; an update gives {known}")
    if weighted and IS_WEIGHTS not in loss.optional_data_keys:
        raise ValueError(
            f"diffusion_loss.loss_mode {name!r} does not name {IS_WEIGHTS} in its optional_data_keys and would ignore "
            "algorithm.rollout_correction.rollout_is: set that to null, or multiply by the weights and name them"
        )


def needs_old_means(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Does this loss compare the means of a step before and after?"""
    return OLD_MEAN in get_diffusion_loss_fn(name, options).required_data_keys


class KLLoss:
    """KL divergence from the policy to the reference, of one reverse step's Gaussians."""

    @classmethod
    def compute_loss(
        cls,
        *,
        prev_sample_mean: Tensor,
        ref_prev_sample_mean: Tensor,
        std_dev_t: Tensor,
        sqrt_dt: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """mean over batch and latent of (mu - mu_ref)^2 / (2 sd^2): the true Gaussian KL, per latent element.

        With `sqrt_dt` divided by 2 g^2 instead, sd = g sqrt(-D): public Flow-GRPO's form, (-D) times the KL.

        Args:
            prev_sample_mean: [B, ...], the policy's.
            ref_prev_sample_mean: [B, ...], the reference's, without gradient.
            std_dev_t: [B, 1, ...], the standard deviation they share; [B, ...] of a kernel whose noise varies in space.
            sqrt_dt: [B], sqrt(-D).
        """
        scale = std_dev_t if sqrt_dt is None else std_dev_t / sqrt_dt.reshape(-1, *[1] * (std_dev_t.ndim - 1))
        kl = mean_drift(prev_sample_mean, ref_prev_sample_mean, scale).mean()
        return kl, {"kl_loss": kl.detach()}


def mean_drift(prev_sample_mean: Tensor, other_mean: Tensor, std_dev_t: Tensor) -> Tensor:
    """mean_dims (mu - mu_other)^2 / (2 sd^2): the KL between a step's Gaussians, per latent element. [B]"""
    return mean_dims((prev_sample_mean - other_mean) ** 2 / (2 * std_dev_t**2))


def velocity_distance(velocity: Tensor, other: Tensor) -> Tensor:
    """mean over batch and latent of (v - v_other)^2, both [B, ...]: what the forward process has in place of a KL."""
    return ((velocity - other) ** 2).mean()
