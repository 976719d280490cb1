# SPDX-License-Identifier: Apache-2.0
"""What comes back out of vLLM-Omni, checked and put together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.errors import DoubleflowError
from models.samples.trajectories import FinishedLatents, Generated, RolloutRequest, Trajectories
from models.weights.canary import relative_difference
from models.weights.trainable import WeightSyncError

RANKS_AGREE = 1e-5
"""Largest relative difference of two ranks' velocities. Each has the sum of all parts, so it is 0 as a rule."""


class RolloutEngineError(DoubleflowError, RuntimeError):
    """The engine could not do what it was asked."""


def reply(method: str, replies: list[Any]) -> Any:
    """The single worker's answer out of what `collective_rpc` returns: a list over stages of lists over workers.

    It reports failures there without raising. LoRA methods come as one answer a stage.

    Raises:
        RolloutEngineError: a worker failed, is missing, or does not know the method.
    """
    answer: Any = replies
    for _ in range(2):
        if isinstance(answer, list):
            if len(answer) != 1:
                raise RolloutEngineError(f"vLLM-Omni gave {len(answer)} answers to {method} where one was due")
            answer = answer[0]
        if isinstance(answer, dict) and (answer.get("error") or answer.get("todo") or answer.get("supported") is False):
            raise RolloutEngineError(f"vLLM-Omni's worker failed at {method}: {answer.get('error') or answer}")
    return answer


def agree(velocities: Sequence[Tensor]) -> Tensor:
    """What all ranks of a worker predict, [S, n, ...] each and of the result.

    Raises:
        WeightSyncError: they predict different things.
    """
    first, *others = velocities
    for rank, velocity in enumerate(others, start=1):
        difference = relative_difference(first, velocity)
        if not difference <= RANKS_AGREE:  # also catches NaN
            raise WeightSyncError(
                f"tensor-parallel rank {rank} of a rollout worker predicts something else than rank 0, by "
                f"{difference:.3g} (relative), allowed {RANKS_AGREE:g}: they do not hold parts of one model"
            )
    return first


def check_acknowledged(what: str, acknowledgements: list[Any]) -> None:
    """Raise RolloutEngineError unless every worker did it."""
    failed = [answer for answer in acknowledgements if getattr(answer, "status", None) != "SUCCESS"]
    if failed or not acknowledgements:
        raise RolloutEngineError(f"vLLM-Omni did not {what}: {failed or 'no worker answered'}")


def join_answers(request: RolloutRequest, answers: list[Any]) -> Generated:
    """The whole request's samples, from the answers in its order."""
    decoded = [[answer.trajectory_decoded[place] for answer in answers] for place in range(5)]
    pictures, latents, means, unconditional, finite = (None if part[0] is None else torch.cat(part) for part in decoded)
    assert finite is not None, "every answer says whether its sample is finite"
    return Generated(pictures, latents, _recorded(request, answers, means, unconditional), finite)


def _recorded(
    request: RolloutRequest, answers: list[Any], means: Tensor | None, unconditional: Tensor | None
) -> Trajectories | FinishedLatents | None:
    if not request.window and not request.record_finished:
        return None
    latents = torch.cat([answer.trajectory_latents for answer in answers])
    if request.record_finished:
        return FinishedLatents(request.keys, request.prompts, request.prompt_index, latents)
    return Trajectories(
        keys=request.keys,
        prompts=request.prompts,
        prompt_index=request.prompt_index,
        window=request.window,
        latents=latents,
        timesteps=torch.cat([answer.trajectory_timesteps for answer in answers]),
        log_probs=torch.cat([answer.trajectory_log_probs for answer in answers]),
        means=means,
        unconditional=unconditional,
    )
