"""What a reward is, and how one is found by its name."""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np


class RewardError(ValueError):
    """A reward is unknown, was given unusable options, or was asked to score what it cannot."""


class ScoredPrompt(Protocol):
    """What a reward may know of a prompt; `tasks.dataset.Prompt` is one."""

    @property
    def prompt(self) -> str: ...
    @property
    def target(self) -> str | None: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class RewardResult:
    """`scores`: float32 [B], NaN where an image could not be scored. `details`: lists of length B, for the logs."""

    scores: np.ndarray
    details: dict[str, list] = field(default_factory=dict)


class Reward(ABC):
    """Scores a batch of images. Subclasses set `name` and `version` and write `score`.

    `version` goes into a run's lineage: it must change whenever the same image could get another score.
    A score that could not be had is NaN and never 0: a failure is no bad picture.
    """

    name: str
    version: str

    def __call__(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Score uint8 RGB `images` [B, H, W, 3], each with its prompt. Raises RewardError for other input."""
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise RewardError(f"{self.name}: images must be uint8 [B, H, W, 3], not {images.dtype} {images.shape}")
        if len(images) != len(prompts):
            raise RewardError(f"{self.name}: {len(images)} images came with {len(prompts)} prompts; give one each")
        result = self.score(images, prompts)
        scores = np.asarray(result.scores, dtype=np.float32)
        sizes = {"scores": scores.shape} | {key: (len(values),) for key, values in result.details.items()}
        wrong = {key: shape for key, shape in sizes.items() if shape != (len(images),)}
        if wrong:
            raise RewardError(f"{self.name}: of {len(images)} images it must return one value each, not {wrong}")
        return RewardResult(scores, result.details)

    @abstractmethod
    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """The scores of a checked batch; each image's must not depend on the others in the batch."""


_REGISTRY: dict[str, type[Reward]] = {}


def register_reward(name: str) -> Callable[[type[Reward]], type[Reward]]:
    """Class decorator that makes a reward known as `name` to `get_reward` and in configurations."""

    def register(cls: type[Reward]) -> type[Reward]:
        if name in _REGISTRY:
            raise RewardError(f"the reward {name!r} is already registered by {_REGISTRY[name].__qualname__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return register


def known_rewards() -> list[str]:
    """The registered names, sorted."""
    return sorted(_REGISTRY)


def get_reward(name: str, **options: Any) -> Reward:
    """A reward by its registered name, or by import path "package.module:attribute" of a Reward class or a function.

    A function is called as `function(images, prompts, **options)` and returns a RewardResult or scores [B].
    Raises RewardError for an unknown name, path or option.
    """
    found = check_reward(name, **options)
    return found(**options) if inspect.isclass(found) else FunctionReward(name, found, options)


def check_reward(name: str, **options: Any) -> Callable:
    """The class or function that `get_reward` would use; nothing is loaded. Raises what `get_reward` raises."""
    if ":" not in name:
        if name not in _REGISTRY:
            raise RewardError(
                f"there is no reward {name!r}; known are {', '.join(known_rewards())}, "
                'and any other can be given as "package.module:function_or_class"'
            )
        _check_options(name, _REGISTRY[name], (), options)
        return _REGISTRY[name]
    found = _import(name)
    if inspect.isclass(found) and issubclass(found, Reward):
        _check_options(name, found, (), options)
        return found
    if inspect.isfunction(found):
        _check_options(name, found, (None, None), options)
        return found
    raise RewardError(
        f"{name} is a {type(found).__name__}; it must be a subclass of tasks.rewards.Reward or a function"
    )


class FunctionReward(Reward):
    """A plain function as a reward; its version is the digest of its module's source, unless it has a `version`."""

    def __init__(self, path: str, function: Callable, options: dict[str, Any]):
        self.name = path
        self.version = getattr(function, "version", None) or _source_digest(function)
        self._function = function
        self._options = options

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """What the function returns, bare scores wrapped up."""
        result = self._function(images, prompts, **self._options)
        return result if isinstance(result, RewardResult) else RewardResult(np.asarray(result))


def weighted_sum(results: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """r = sum_k w_k r_k, float32 [B]. NaN where any reward with a weight is NaN: part of a sum is not the sum.

    A reward of weight 0 is only watched: its NaN spoil nothing. Raises RewardError when the names differ.
    """
    if set(results) != set(weights):
        raise RewardError(f"rewards {sorted(results)} need a weight each, but the weights are for {sorted(weights)}")
    terms = [weight * results[name].astype(np.float64) for name, weight in weights.items() if weight != 0]
    if not terms:
        raise RewardError("every reward has weight 0; at least one must count")
    return np.sum(terms, axis=0).astype(np.float32)


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise RewardError(f"the reward {path!r} cannot be imported: {error}") from error


def _check_options(name: str, target: Callable, arguments: tuple, options: dict[str, Any]) -> None:
    signature = inspect.signature(target)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise RewardError(f"reward {name!r}: {error}; it takes {signature}") from error


def _source_digest(function: Callable) -> str:
    module = inspect.getmodule(function)
    source = inspect.getsource(module if module else function)
    return f"source-{blake2b(source.encode(), digest_size=8).hexdigest()}"
