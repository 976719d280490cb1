"""Losses: what an update minimises, computed where the gradients are.

A loss is split in two. `compute_loss` is the formula on plain tensors. `__call__` takes what it needs from the
model's output and the micro-batch, and says beforehand which keys those are, so that a missing input is an error
with a name and not a KeyError in the middle of a step. The policy-gradient losses stand in `policy_gradient`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from models.algorithms.registry import NameRegistry
from models.schedulers.kernels import mean_dims

if TYPE_CHECKING:
    from models.config import DiffusionActorConfig

MODEL_OUTPUTS = ("log_probs", "prev_sample_mean", "std_dev_t", "sqrt_dt")
"""What replaying a step gives, `DiffusionModelBase.forward_and_sample_previous_step`."""
OLD_MEAN = "old_prev_sample_mean"
IS_WEIGHTS = "rollout_is_weights"
DATA = ("old_log_probs", "advantages", OLD_MEAN)
"""What the engine gives any loss that asks for it."""


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

    required_model_output_keys: ClassVar[tuple[str, ...]] = ()
    """Of MODEL_OUTPUTS."""
    required_data_keys: ClassVar[tuple[str, ...]] = ()
    """Of DATA, and `ref_prev_sample_mean` where the KL to the reference is in use."""
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
        """Hook before the update. Reverse-process losses need nothing: advantages and old log-probs are there."""
        return batch

    def validate_inputs(self, *, loss_name: str, model_output: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Check the keys this loss declared.

        Raises:
            ValueError: names the loss and every missing key.
        """
        missing = [f"model output {key!r}" for key in self.required_model_output_keys if key not in model_output]
        missing += [f"data {key!r}" for key in self.required_data_keys if key not in data]
        if missing:
            raise ValueError(f"loss {loss_name!r} needs {', '.join(missing)}, which the update was not given")


_LOSSES: NameRegistry[type[DiffusionLossFn]] = NameRegistry("loss", "actor_rollout_ref.actor.diffusion_loss.loss_mode")


def register_diffusion_loss(name: str):
    """Class decorator that makes a loss selectable as `diffusion_loss.loss_mode`."""
    return _LOSSES.register(name)


def get_diffusion_loss_fn(name: str) -> DiffusionLossFn:
    """An instance of the loss of that name, or at that import path.

    Raises:
        ValueError: unknown; the message lists the known names.
    """
    return _LOSSES.get(name)()


def check_loss_inputs(name: str, use_kl_loss: bool, weighted: bool = False) -> None:
    """Check before any model loads that the engine can give a loss what it declares.

    Args:
        name: of the loss, or its import path.
        use_kl_loss: is there a reference?
        weighted: will samples have importance weights?

    Raises:
        ValueError: unknown loss, one that asks for something else (every such key is named), or one that would ignore
            the weights.
    """
    loss = get_diffusion_loss_fn(name)
    given = {*DATA, "ref_prev_sample_mean"} if use_kl_loss else {*DATA}
    wrong = [key for key in loss.required_model_output_keys if key not in MODEL_OUTPUTS]
    wrong += [key for key in loss.required_data_keys if key not in given]
    if wrong:
        known = ", ".join([*MODEL_OUTPUTS, *sorted(given)])
        raise ValueError(f"diffusion_loss.loss_mode {name!r} needs {', '.join(wrong)}; an update gives {known}")
    if weighted and IS_WEIGHTS not in loss.optional_data_keys:
        raise ValueError(
            f"diffusion_loss.loss_mode {name!r} does not name {IS_WEIGHTS} in its optional_data_keys and would ignore "
            "algorithm.rollout_correction.rollout_is: set that to null, or multiply by the weights and name them"
        )


def needs_old_means(name: str) -> bool:
    """Does this loss compare the means of a step before and after?"""
    return OLD_MEAN in get_diffusion_loss_fn(name).required_data_keys


class KLLoss:
    """KL divergence from the policy to the reference, of one reverse step's Gaussians."""

    @classmethod
    def compute_loss(
        cls, *, prev_sample_mean: Tensor, ref_prev_sample_mean: Tensor, std_dev_t: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """mean over batch and latent of (mu - mu_ref)^2 / (2 sd^2): the true Gaussian KL, per latent element.

        Args:
            prev_sample_mean: [B, ...], the policy's.
            ref_prev_sample_mean: [B, ...], the reference's, without gradient.
            std_dev_t: [B, 1, ...], the standard deviation they share.
        """
        kl = mean_drift(prev_sample_mean, ref_prev_sample_mean, std_dev_t).mean()
        return kl, {"kl_loss": kl.detach()}


def mean_drift(prev_sample_mean: Tensor, other_mean: Tensor, std_dev_t: Tensor) -> Tensor:
    """mean_dims (mu - mu_other)^2 / (2 sd^2): the KL between a step's Gaussians, per latent element. [B]"""
    return mean_dims((prev_sample_mean - other_mean) ** 2 / (2 * std_dev_t**2))
