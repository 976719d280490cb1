# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's step execution: it takes each request a step further at a time, so that one may join others on their way.

The steps are `models.rollout.sampling`'s. A batch may hold samples of any windows, noise levels and numbers of steps.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.families.velocity import velocity_field
from models.rollout.sampling import Denoising, Sampler
from models.rollout.vllm_omni.sample_request import SampleRequest, join, sample_of
from models.samples.trajectories import Generated, PromptTable

DENOISING, SAMPLE, UNCONDITIONAL = "denoising", "sample", "unconditional"
"""Where a request's state keeps, in its `extra`: its way, what it is, and what `velocity_field` gives beside the
velocity."""


NOTHING = Generated(None, None, None, torch.ones(1, dtype=torch.bool))
"""What a request that vLLM-Omni warms up with gives."""


class StepExecution:
    """The part of a rollout pipeline that vLLM-Omni calls step by step (its `SupportsStepExecution`).

    A state is one sample's. vLLM-Omni warms up with requests that hold none; these are walked through and not computed.
    """

    supports_step_execution: ClassVar[bool] = True
    sampler: Sampler

    def table_of(self, sample: SampleRequest) -> PromptTable:
        """The prompts of a sample."""
        raise NotImplementedError

    def output_of(self, made: Generated) -> Any:
        """One sample's, as vLLM-Omni carries it."""
        raise NotImplementedError

    def prepare_encode(self, state: Any, **_: Any) -> Any:
        """Begin a request.

        Raises:
            ValueError: it holds no sample, or of an unknown prompt table.
        """
        from vllm_omni.diffusion.request import OmniDiffusionRequest

        if OmniDiffusionRequest.is_dummy_run_request_id(state.request_id):
            device = self.sampler.device
            state.latents = torch.zeros(1, 1, device=device)
            state.timesteps = torch.zeros(state.sampling.num_inference_steps, device=device)
            return state
        sample = sample_of(state.sampling)
        denoising = self.sampler.begin(join([sample], self.table_of(sample)), sample.pipeline, sample.algo)
        state.extra |= {SAMPLE: sample, DENOISING: denoising}
        state.latents, state.timesteps = denoising.latents, denoising.timesteps
        return state

    @torch.no_grad()
    def denoise_step(self, input_batch: Any, *, states: Sequence[Any], **_: Any) -> Tensor:
        """Velocities [B, ...] of the states' next steps, in their order."""
        velocities = list(torch.zeros_like(input_batch.latents).split(1))
        together = defaultdict(list)
        for number, state in enumerate(states):
            if SAMPLE in state.extra:
                sample = state.extra[SAMPLE]
                together[sample.table, sample.pipeline, sample.record_unconditional].append((sample.place, number))
        for group in together.values():
            numbers = [number for _, number in sorted(group)]
            guided, unconditional = self._velocities([states[number] for number in numbers])
            for row, number in enumerate(numbers):
                velocities[number] = guided[row : row + 1]
                half = None if unconditional is None else unconditional[row : row + 1]
                states[number].extra[UNCONDITIONAL] = half
        return torch.cat(velocities)

    def _velocities(self, states: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """Of samples of one table and one way to sample, each at a step of its own; see `velocity_field`."""
        ways: list[Denoising] = [state.extra[DENOISING] for state in states]
        sample, device = states[0].extra[SAMPLE], self.sampler.device
        index = torch.tensor([state.extra[SAMPLE].row for state in states], device=device)
        table, config = self.table_of(sample), ways[0].model_config
        one_pass = not sample.record_unconditional  # as in `models.rollout.sampling.Sampler.sample`
        velocity = velocity_field(self.sampler.adapter, self.sampler.module, config, table, index, one_pass=one_pass)
        latents = torch.cat([way.latents for way in ways])
        return velocity(latents, torch.stack([way.timesteps[way.step] for way in ways]).to(device))

    def step_scheduler(self, state: Any, noise_pred: Tensor, **_: Any) -> None:
        """Take the state's step, given its velocity [1, ...]."""
        if SAMPLE not in state.extra:
            state.step_index += 1
            return
        denoising = state.extra[DENOISING]
        denoising.advance(noise_pred, state.extra.pop(UNCONDITIONAL))
        state.latents, state.step_index = denoising.latents, denoising.step

    def post_decode(self, state: Any, **_: Any) -> Any:
        """What a finished request wants."""
        if SAMPLE not in state.extra:
            return self.output_of(NOTHING)
        return self.output_of(self.sampler.finish(state.extra[DENOISING]))
