# SPDX-License-Identifier: Apache-2.0
"""Reward functions of one sample, in VeRL-Omni's form: `compute_score(data_source, solution_image, ground_truth, ...)`.

Such a function, `def` or `async def`, gives a number or a mapping with the key `score`; what else is in the mapping
becomes details. Its picture is a torch tensor, float32 from 0 to 1: [C, H, W], or [N, C, H, W] of a video.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tasks.rewards import served
from tasks.rewards.errors import RewardError
from tasks.rewards.scored_prompt import ScoredPrompt

PICTURE = "solution_image"
"""By this parameter such a function is known."""
GIVEN = ("data_source", PICTURE, "ground_truth", "extra_info")
LEFT_OUT = "reward_model_tokenizer"
"""Handed on to functions there, and read by none of those that judge pictures: it is None here."""

SERVED = {"reward_router_address": served.address, "model_name": served.name}
"""Parameters that the model of `reward.reward_model` fills in, where the options leave out the first one."""


def asks_served_model(function: Callable, options: Mapping[str, Any]) -> bool:
    """Does the function ask a model at an address that its options do not give?"""
    address = next(iter(SERVED))
    parameter = inspect.signature(function).parameters.get(address)
    return parameter is not None and parameter.default is parameter.empty and address not in options


def is_per_sample(function: Callable) -> bool:
    """Does the function score one sample?"""
    return PICTURE in inspect.signature(function).parameters


def arguments(
    function: Callable, batch: np.ndarray | None, prompt: ScoredPrompt | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What the function is called with: of what there is to give the parameters that it has, and all options.

    Args:
        batch: uint8 RGB [F, H, W, 3], a picture being a video of one frame; None only names what would be given.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named: dict[str, Any] = {name: None for name in GIVEN if takes_all or name in parameters}
    if LEFT_OUT in parameters:
        named[LEFT_OUT] = None
    if asks_served_model(function, options):
        named |= {name: value() for name, value in SERVED.items() if name in parameters}
    values = _values(batch, prompt) if batch is not None and prompt is not None else {}
    return {**named, **{name: values[name] for name in named if name in values}, **options}


def _values(video: np.ndarray, prompt: ScoredPrompt) -> dict[str, Any]:
    import torch  # here: a reward's worker that has no model needs none of it

    frames = torch.from_numpy(np.ascontiguousarray(video)).permute(0, 3, 1, 2).float() / 255
    metadata = dict(prompt.metadata)
    extra = metadata.get("extra_info")
    told = metadata.get("reward_model")
    truths = (metadata.get("ground_truth"), told.get("ground_truth") if isinstance(told, Mapping) else None)
    return {
        "data_source": metadata.get("data_source", ""),
        PICTURE: frames[0] if len(frames) == 1 else frames,
        "ground_truth": next(truth for truth in (*truths, prompt.target, prompt.prompt) if truth is not None),
        "extra_info": {"prompt": prompt.prompt, **(extra if isinstance(extra, Mapping) else metadata)},
    }


async def score_each(
    function: Callable, batch: np.ndarray, prompts: Sequence[ScoredPrompt], options: Mapping[str, Any]
) -> tuple[np.ndarray, dict[str, list]]:
    """(scores float64 [B], details) of a batch uint8 [B, F, H, W, 3]; an async function's calls wait side by side.

    A sample whose call raises, or gives no number as its score, is NaN, with its error; where all do, that is the
    batch's error, and tried again.

    Raises:
        RewardError: that of any sample, for no retry would cure it.
    """

    async def one(video: np.ndarray, prompt: ScoredPrompt) -> Any:
        answer = function(**arguments(function, video, prompt, options))
        return await answer if inspect.isawaitable(answer) else answer

    answers = await asyncio.gather(*map(one, batch, prompts), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, RewardError):
            raise answer
    found = [answer if isinstance(answer, BaseException) else _number(answer, function.__name__) for answer in answers]
    errors = [number if isinstance(number, BaseException) else None for number in found]
    if answers and all(errors):
        raise next(error for error in errors if error is not None)
    scores = np.array([np.nan if isinstance(number, BaseException) else number for number in found])
    rows = [answer if isinstance(answer, Mapping) else {} for answer in answers]
    names = dict.fromkeys(str(name) for row in rows for name in row if name not in ("score", "error"))
    details: dict[str, list] = {name: [row.get(name) for row in rows] for name in names}
    if any(errors):
        details["error"] = [None if error is None else f"{type(error).__name__}: {error}" for error in errors]
    return scores, details


def _number(answer: Any, name: str) -> float | ValueError:
    """The score of what a function of this name gave, of a list the first, as there; why it has none.

    A text is none, whatever it says: a function that gives texts has not read the answer that it had.
    """
    if isinstance(answer, Mapping) and "score" not in answer:
        return ValueError(f"{name} gives a mapping without `score`: {', '.join(map(str, answer))}")
    score = answer["score"] if isinstance(answer, Mapping) else answer
    if isinstance(score, Sequence) and score and not isinstance(score, str | bytes):
        score = score[0]
    none = ValueError(f"{name} gives {score!r:.60} as the score, which is no number")
    if isinstance(score, str | bytes):
        return none
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: of a tensor of several numbers
        return none
