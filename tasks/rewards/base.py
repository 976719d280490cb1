# SPDX-License-Identifier: Apache-2.0
"""What a reward is, and how one is found by its name."""

import asyncio
import inspect
import posixpath
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from models.import_paths import ModuleNotAllowed
from models.registry import check_kind, import_object
from tasks.config.errors import near
from tasks.rewards import served
from tasks.rewards.errors import RewardError
from tasks.rewards.per_sample import arguments, asks_served_model, is_per_sample, score_each
from tasks.rewards.scored_prompt import ScoredPrompt
from tasks.system.credentials import CredentialError, refuse_secret_options

Input = Literal["images", "video", "latents"]
"""What a reward may ask for: pictures, whole videos, or the sampler's finished latents."""


DETAIL = re.compile(r"[\w./: -]{1,100}")
"""Name of a detail of numbers, which names a metric."""
NOT_FINITE = "the reward itself returned"
"""Begins the error of a score that was given and is no number to learn from."""


@dataclass(frozen=True)
class RewardResult:
    """`scores`: float32 [B], NaN where an image could not be scored. `details`: lists of length B, for the logs.

    The detail `error` says of each NaN why it is one, and is None elsewhere. A reward may leave it out: what it returns
    that is not finite becomes NaN with its value as the error.
    A detail's values are numbers, or all bools, or all text, with None among them; `Reward` makes text of any other.
    One of numbers is a metric, so its name has at most 100 letters, digits and _ . - / : and blanks.
    `seconds` is what its worker spent on it, and `version` the reward's there; a reward leaves both out.
    `raised` has the indices of samples, together those whose scores failed together of what another try may cure.
    """

    scores: np.ndarray
    details: dict[str, list] = field(default_factory=dict)
    seconds: float = 0.0
    version: str = ""
    raised: tuple[tuple[int, ...], ...] = ()


class Reward(ABC):
    """Scores a batch. Subclasses set `name` and `version`, and write `score` as `def` or as `async def`.

    `version` goes into a run's lineage: it must change whenever the same image could get another score.
    A score that could not be had is NaN and never 0: a failure is no bad picture. An infinite one counts as NaN.
    `bounds` are the lowest and the highest score there can be, None where that is not known; a run whose first scores
    all lie near the lowest says so.
    `wants` says what `score` is given: "images", uint8 RGB [B, H, W, 3]; "video", uint8 RGB [B, F, H, W, 3], a picture
    being a video of one frame; "latents", float32 [B, ...], as the sampler left them.
    `packages` are those that an environment may lack: the module that is imported of each, once the reward is made, to
    the package that has it. A run is refused where the driver lacks one.
    """

    name: str
    version: str
    wants: ClassVar[Input] = "images"
    bounds: ClassVar[tuple[float, float] | None] = None
    packages: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """Raise RewardError for options that can be known to be unusable before anything is loaded.

        Args:
            name: of the reward, for the message.
            options: what the config gives; defaults are not among them.
        """
        return None

    @classmethod
    def input_with(cls, options: Mapping[str, Any]) -> Input:
        """What `score` is given with these options: what `wants` says, unless a class says otherwise here.

        Args:
            options: what the config gives; defaults are not among them.
        """
        return cls.wants

    @classmethod
    def core_seconds(cls, options: Mapping[str, Any], pixels: int) -> float | None:
        """Seconds of a CPU core for one picture, as measured; None where that is not known.

        Args:
            options: what the config gives; defaults are not among them.
            pixels: of the picture.
        """
        return None

    @classmethod
    def gpu_models(cls, options: Mapping[str, Any]) -> tuple[list[Path], str]:
        """Folders of the models that a worker holds on its GPU, and their number format, as far as that is known before
        they are loaded; none where it computes on a CPU.

        Args:
            options: what the config gives; defaults are not among them.
        """
        return [], ""

    @classmethod
    def asks_reward_model(cls, options: Mapping[str, Any]) -> bool:
        """Does it ask the model of `reward.reward_model`?"""
        return False

    @classmethod
    def check_prompts(cls, name: str, options: Mapping[str, Any], prompts: Sequence[ScoredPrompt]) -> None:
        """Raise RewardError for prompts of a run that can be known to be unscorable before anything is loaded.

        Args:
            name, options: as `check_options` gets them.
        """
        return None

    def __call__(self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Score a batch, each sample with its prompt.

        Args:
            batch: uint8 RGB images [B, H, W, 3] or videos [B, F, H, W, 3]; or latents, for a reward that wants them.
                A reward of images scores the frames of a video one by one, and the video gets their mean.
            prompts: B of them.

        Raises:
            RewardError: for other input, and when the reward does not return one value a sample, or gives numbers under
                a name that no metric can have.
        """
        if len(batch) != len(prompts):
            raise RewardError(f"{self.name}: {len(batch)} images came with {len(prompts)} prompts; give one each")
        if self.wants == "latents":
            if batch.dtype != np.float32:
                raise RewardError(f"{self.name}: latents must be float32 [B, ...], not {batch.dtype} {batch.shape}")
            return self._checked(batch, prompts)
        if batch.dtype != np.uint8 or batch.ndim not in (4, 5) or batch.shape[-1] != 3:
            raise RewardError(
                f"{self.name}: images must be uint8 [B, H, W, 3] or [B, F, H, W, 3], not {batch.dtype} {batch.shape}"
            )
        if self.wants == "video":
            return self._checked(batch if batch.ndim == 5 else batch[:, None], prompts)
        if batch.ndim == 4:
            return self._checked(batch, prompts)
        frames = self._checked(batch.reshape(-1, *batch.shape[2:]), [p for p in prompts for _ in range(batch.shape[1])])
        return _mean_over_frames(frames, batch.shape[1])

    @abstractmethod
    def score(
        self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]
    ) -> RewardResult | np.ndarray | Awaitable[RewardResult | np.ndarray]:
        """The scores [B] of a checked batch, bare or with details; each must not depend on the others in the batch.

        Args:
            batch: of the kind that `wants` names, in the shape that the class says of it: [B, ...].
            prompts: of its samples.
        """

    def _checked(self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        answer = self.score(batch, prompts)
        result: Any = self._loop.run(_value_of(answer)) if inspect.isawaitable(answer) else answer
        if not isinstance(result, RewardResult):
            result = RewardResult(np.asarray(result))
        given = np.asarray(result.scores, dtype=np.float64)
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and so missing
            scores = given.astype(np.float32)
        details = {_text(name): values for name, values in result.details.items()}
        sizes = {"scores": scores.shape} | {key: (len(values),) for key, values in details.items()}
        wrong = {key: shape for key, shape in sizes.items() if shape != (len(batch),)}
        if wrong:
            raise RewardError(f"{self.name}: of {len(batch)} images it must return one value each, not {wrong}")
        details = {name: one_kind(values) for name, values in details.items()}
        self._check_metrics(details)
        if "error" in details:  # pandas and numpy write NaN where there is nothing
            details["error"] = [None if _kind(v) is None else _text(v) for v in details["error"]]
        missing = ~np.isfinite(scores)
        if not missing.any():
            return RewardResult(scores, details, raised=result.raised)
        said = details.get("error", [None] * len(scores))
        error = [
            f"{NOT_FINITE} {value}" if gone and reason is None else reason
            for value, gone, reason in zip(given, missing, said, strict=True)
        ]
        scores = np.where(missing, np.float32(np.nan), scores)
        return RewardResult(scores, details | {"error": error}, raised=result.raised)

    def _check_metrics(self, details: Mapping[str, Sequence[Any]]) -> None:
        """Known at the first scores: MLflow would say so of a whole iteration."""
        for name in details:
            if can_be_metric(name):
                continue
            if any(_kind(value) == "number" for value in details[name]):
                raise RewardError(
                    f"{self.name}: its detail {name[:120]!r} holds numbers and would be a metric, which cannot be "
                    "called so: give it a name of letters, digits and _ . - : and blanks, at most 100 characters"
                )

    @cached_property
    def _loop(self) -> asyncio.Runner:
        """One event loop for the reward's life, so that its connections outlive a batch."""
        return asyncio.Runner()


def can_be_metric(detail: str) -> bool:
    """Does MLflow take a metric of this detail? It asks for a path without empty or dotted parts."""
    path = f"details/{detail}/mean"
    return DETAIL.fullmatch(detail) is not None and posixpath.normpath(path) == path


def one_kind(values: Iterable[Any]) -> list:
    """A detail's values as a column of one kind, which a table can hold: bools, numbers or text, and None.

    A number, a bool, a text and None stay what they are, numpy's become Python's, and anything else becomes text. Where
    kinds are mixed, all become text but None. NaN among bools or text is None, as pandas writes it.
    """
    plain = [_plain(value) for value in values]
    kinds = {_kind(value) for value in plain} - {None}
    if not kinds or kinds == {"number"}:
        return plain
    told = [None if _kind(value) is None else value for value in plain]
    return told if len(kinds) == 1 else [None if value is None else _text(value) for value in told]


def one_kind_of_lists(rows: Iterable[Any]) -> list:
    """As `one_kind`, where a row may be the list of a video's frames: all lists together then hold one kind."""
    rows = list(rows)
    if not any(isinstance(row, list) for row in rows):
        return one_kind(rows)
    lists = [row if isinstance(row, list) else [row] for row in rows]
    flat = iter(one_kind(value for row in lists for value in row))
    return [[next(flat) for _ in row] for row in lists]


def _plain(value: Any) -> bool | int | float | str | None:
    if getattr(value, "shape", None) == ():  # a scalar of numpy or torch
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else _text(value)  # a table's integers have 64 bits
    return float(value) if isinstance(value, float) else _text(value)


def _kind(value: Any) -> str | None:
    if value is None or value != value:
        return None
    return "text" if isinstance(value, str) else "bool" if isinstance(value, bool) else "number"


def _text(value: Any) -> str:
    """As text that UTF-8 can write: half of a surrogate pair, which JSON may bring, becomes its escape."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # an int of more digits, or lists deeper, than Python writes
        text = f"a value that cannot be written ({type(value).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


async def _value_of(answer: Awaitable[Any]) -> Any:
    return await answer


def _mean_over_frames(result: RewardResult, frames: int) -> RewardResult:
    """Scores of B F frames to scores of B videos; a detail becomes the list of its frames' values."""
    details: dict[str, list] = {
        key: [v[i : i + frames] for i in range(0, len(v), frames)] for key, v in result.details.items()
    }
    if "error" in details:  # the first one: a video has one reason to be missing
        details["error"] = [next((e for e in errors if e is not None), None) for errors in details["error"]]
    means = result.scores.reshape(-1, frames).mean(1, dtype=np.float64)  # in float32 large scores' sum is infinite
    raised = tuple(tuple(dict.fromkeys(index // frames for index in together)) for together in result.raised)
    return RewardResult(means.astype(np.float32), details, raised=raised)


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

    A function, `def` or `async def`, is called as `function(images, prompts, **options)` and returns a RewardResult
    or scores [B]; its attributes `version`, `wants` and `bounds` count as a class's do. One that has a parameter
    `solution_image` is called for each sample, see `tasks.rewards.per_sample`.
    Raises RewardError for an unknown name, path or option.
    """
    found = check_reward(name, **options)
    if isinstance(found, type):
        return found(**options)
    return (PerSampleReward if is_per_sample(found) else FunctionReward)(name, found, options)


def reward_input(name: str, **options: Any) -> Input:
    """What the reward wants, without loading it. Raises what `get_reward` raises."""
    found = check_reward(name, **options)
    if isinstance(found, type):
        return found.input_with(options)
    default: Input = "video" if is_per_sample(found) else "images"
    return getattr(found, "wants", default)


def reward_bounds(name: str, **options: Any) -> tuple[float, float] | None:
    """The reward's lowest and highest score, where it tells them, without loading it. Raises what `get_reward` does."""
    return getattr(check_reward(name, **options), "bounds", None)


def asks_reward_model(name: str, **options: Any) -> bool:
    """Does the reward ask the model of `reward.reward_model`? Raises what `get_reward` does."""
    found = check_reward(name, **options)
    if isinstance(found, type):
        return found.asks_reward_model(options)
    return is_per_sample(found) and asks_served_model(found, options)


def check_reward(name: str, **options: Any) -> type[Reward] | FunctionType:
    """The class or function that `get_reward` would use; nothing is loaded. Raises what `get_reward` raises."""
    if ":" not in name:
        if name not in _REGISTRY:
            raise RewardError(
                f"there is no reward {name!r}{near(name, known_rewards())}; known are {', '.join(known_rewards())}, "
                'and any other can be given as "package.module:function_or_class"'
            )
        return _checked_class(name, _REGISTRY[name], options)
    found = _import(name)
    if inspect.isclass(found) and issubclass(found, Reward):
        return _checked_class(name, found, options)
    if inspect.isfunction(found):
        if is_per_sample(found):
            _check_options(name, found, (), options, arguments(found, None, None, {}))
        else:
            _check_options(name, found, (None, None), options)
        _check_kinds(name, found, options)
        return found
    raise RewardError(
        f"{name} is a {type(found).__name__}; it must be a subclass of tasks.rewards.Reward or a function"
    )


def _checked_class(name: str, found: type[Reward], options: dict[str, Any]) -> type[Reward]:
    """The class itself, which takes the options and finds its packages."""
    _check_options(name, found, (), options)
    for module, package in found.packages.items():
        if find_spec(module) is None:
            raise RewardError(
                f"reward {name!r} needs the package {package}, which the environment of {sys.prefix} lacks: install it "
                "there"
            )
    found.check_options(name, options)
    _check_kinds(name, found, options)
    return found


class FunctionReward(Reward):
    """A plain function as a reward; its version is the digest of its module's source, unless it has a `version`."""

    def __init__(self, path: str, function: Callable, options: dict[str, Any]):
        """Take name, version and wants from the function, where it has them."""
        self.name = path
        self.version = getattr(function, "version", None) or _source_digest(function)
        self.wants = getattr(function, "wants", "images")  # type: ignore[misc]  # a class's is fixed, a function's is not
        self._function = function
        self._options = options

    def score(self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]) -> Any:
        """What the function returns."""
        return self._function(batch, prompts, **self._options)


class PerSampleReward(FunctionReward):
    """A function of one sample as a reward; it sees whole videos, a picture as one frame without that dimension."""

    def __init__(self, path: str, function: Callable, options: dict[str, Any]):
        """As a function's. Raises RewardError where it asks a judge, and there is none."""
        if asks_served_model(function, options) and served.address() is None:
            raise RewardError(
                f"reward {path!r}: the option reward_router_address is missing and this process has no served model: "
                "give the address of one, or let a run serve it with reward.reward_model"
            )
        super().__init__(path, function, options)
        self.wants = getattr(function, "wants", "video")  # type: ignore[misc]

    async def score(self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """The scores of the samples, each by itself."""
        batch = batch if batch.ndim == 5 else batch[:, None]
        return RewardResult(*await score_each(self._function, batch, prompts, self._options))


def weighted_sum(results: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """r = sum_k w_k r_k, float32 [B]. NaN where any reward with a weight is NaN: part of a sum is not the sum.

    A sum that float32 cannot hold is NaN, too. A reward of weight 0 is only watched: its NaN spoil nothing. Raises
    RewardError when the names differ.
    """
    if set(results) != set(weights):
        raise RewardError(f"rewards {sorted(results)} need a weight each, but the weights are for {sorted(weights)}")
    terms = [weight * results[name].astype(np.float64) for name, weight in weights.items() if weight != 0]
    if not terms:
        raise RewardError("every reward has weight 0; at least one must count")
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum(terms, axis=0).astype(np.float32)
    return np.where(np.isfinite(total), total, np.float32(np.nan))


def with_group_means(scores: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """Scores [B] of an optional reward with each NaN replaced by the mean of its group's other scores.

    Samples are compared within their group, and a sum without a term could not be compared with one that has it. At
    the group's mean the term speaks neither for nor against the sample. A group without any score takes the mean of
    all groups, or 0 where nothing is scored: the same for each of its samples, so again nothing is said.

    Args:
        scores: [B], NaN where missing.
        uids: [B]; the samples of equal uids are a group.
    """
    filled = scores.astype(np.float64)
    missing = np.isnan(filled)
    overall = filled[~missing].mean() if not missing.all() else 0.0
    for uid in np.unique(uids[missing]):
        group = uids == uid
        seen = group & ~missing
        filled[group & missing] = filled[seen].mean() if seen.any() else overall
    return filled.astype(np.float32)


def _import(path: str) -> Any:
    try:
        return import_object(path, f"the reward {path!r}")
    except ModuleNotAllowed as error:
        raise RewardError(f"the reward {error}") from error
    except ValueError as error:
        raise RewardError(str(error)) from error


def _check_options(
    name: str,
    target: Callable,
    positional: tuple,
    options: dict[str, Any],
    given: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    signature = _signature(target)
    try:
        refuse_secret_options(options, f"reward {name!r}")
    except CredentialError as error:
        raise RewardError(str(error)) from None
    try:
        signature.bind(*positional, **{**given, **options})
    except TypeError as error:
        raise RewardError(f"reward {name!r}: {error}; it takes {signature}") from error


def _check_kinds(name: str, target: Callable, options: Mapping[str, Any]) -> None:
    """Raise RewardError for an option of another kind than its annotation says: a worker would end by it, again and
    again. So for `wants` that is none: it would be given pictures."""
    if (wants := getattr(target, "wants", "images")) not in get_args(Input):
        raise RewardError(f"reward {name!r}: wants is {wants!r}; it should be one of {', '.join(get_args(Input))}")
    parameters = _signature(target).parameters
    for option in options.keys() & parameters.keys():
        try:
            check_kind(f"reward {name!r}: {option}", parameters[option], options[option])
        except ValueError as error:
            raise RewardError(str(error)) from error


def _signature(target: Callable) -> inspect.Signature:
    """Of a function, or of a class together with the parents to whose __init__ it hands on its **options."""
    if not inspect.isclass(target):
        return inspect.signature(target)
    named: dict[str, inspect.Parameter] = {}
    for cls in target.__mro__:
        if "__init__" not in vars(cls):
            continue
        own = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]  # without self
        hands_on = [p for p in own if p.kind is inspect.Parameter.VAR_KEYWORD]
        named = {p.name: p for p in own if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} | named
        if not hands_on:
            break
    return inspect.Signature(sorted(named.values(), key=lambda p: p.kind))


def _source_digest(function: Callable) -> str:
    module = inspect.getmodule(function)
    source = inspect.getsource(module if module else function)
    return f"source-{blake2b(source.encode(), digest_size=8).hexdigest()}"
