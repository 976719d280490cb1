# SPDX-License-Identifier: Apache-2.0
"""One sample as vLLM-Omni sees it: a request of its own, which the engine puts into batches again.

The prompts' embeddings do not travel with the samples. They are put into the worker once, as a table, and a sample
names the table and its row.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from models.families.base import DiffusionModelConfig
from models.samples.trajectories import PromptTable, RolloutRequest
from models.schedulers.noise_keys import NoiseKey

if TYPE_CHECKING:
    from models.config.algo import DiffusionRolloutAlgoConfig
    from models.config.pipeline import DiffusionPipelineConfig

EXTRA_ARG = "rollout_sample"
"""Name under which a sample travels in the `extra_args` of vLLM-Omni's sampling parameters."""


@dataclass(frozen=True)
class SampleRequest:
    """One sample of a `RolloutRequest`.

    Attributes:
        key: its noise.
        table: digest of the prompt table, see `table_digest`.
        row: its prompt's row there.
        place: its place in the request.
        window: stochastic steps.
        record_means: also record each window step's mean.
        record_unconditional: also record the half of the guidance without the prompt.
        record_finished: keep the finished latents.
        outputs: see `RolloutRequest`.
        pipeline: how it is sampled.
        algo: how it explores.
    """

    key: NoiseKey
    table: str
    row: int
    place: int
    window: tuple[int, ...]
    record_means: bool
    record_unconditional: bool
    record_finished: bool
    outputs: frozenset[str]
    pipeline: "DiffusionPipelineConfig"
    algo: "DiffusionRolloutAlgoConfig"


_SHARED = (
    "window",
    "record_means",
    "record_unconditional",
    "record_finished",
    "outputs",
    "pipeline",
    "algo.noise_level",
    "algo.sde_type",
    "algo.sde_options",
    "algo.init_same_noise",
)


def table_digest(prompts: PromptTable) -> str:
    """Name of a prompt table by its content."""
    named = {field.name: getattr(prompts, field.name) for field in fields(prompts) if field.name != "extras"}
    digest = hashlib.sha256()
    for name, tensor in sorted((named | dict(prompts.extras)).items()):
        if tensor is not None:
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def split(
    request: RolloutRequest, table: str, model_config: DiffusionModelConfig, pipeline: "DiffusionPipelineConfig"
) -> list[SampleRequest]:
    """The request's samples, in its order."""
    return [
        SampleRequest(
            key=key,
            table=table,
            row=row,
            place=place,
            window=request.window,
            record_means=request.record_means,
            record_unconditional=request.record_unconditional,
            record_finished=request.record_finished,
            outputs=request.outputs,
            pipeline=pipeline,
            algo=model_config.algo,
        )
        for place, (key, row) in enumerate(zip(request.keys, request.prompt_index.tolist(), strict=True))
    ]


def check_alike(samples: Sequence[SampleRequest]) -> None:
    """A batch goes through one loop, so its samples must agree on everything but noise and prompt.

    Raises:
        ValueError: they do not; the message names the field.
    """
    for name in _SHARED:
        values = [attrgetter(name)(sample) for sample in samples]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"one batch holds samples with {name} {' and '.join(sorted({*map(str, values)}))}: send them one after "
                "the other"
            )


def join(samples: Sequence[SampleRequest], prompts: PromptTable) -> RolloutRequest:
    """Samples of one table as one request, in the order given."""
    return RolloutRequest(
        keys=tuple(sample.key for sample in samples),
        prompts=prompts,
        prompt_index=torch.tensor([sample.row for sample in samples]),
        window=samples[0].window,
        record_means=samples[0].record_means,
        record_unconditional=samples[0].record_unconditional,
        record_finished=samples[0].record_finished,
        outputs=samples[0].outputs,
    )


def sample_of(parameters: Any) -> SampleRequest:
    """What vLLM-Omni's sampling parameters carry.

    Raises:
        ValueError: nothing.
    """
    sample = (parameters.extra_args or {}).get(EXTRA_ARG)
    if sample is None:
        raise ValueError(
            f"this engine serves rollouts: a request needs extra_args[{EXTRA_ARG!r}]; plain prompts are for a server "
            "of the exported weights"
        )
    return sample
