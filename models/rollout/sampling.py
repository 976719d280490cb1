# SPDX-License-Identifier: Apache-2.0
"""The denoising loop, once for all families and both uses of it: exploring (window of SDE steps) and the plain ODE."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import to_uint8
from models.families.velocity import velocity_field
from models.runtime.side_stream import Mark, SideStream
from models.samples.trajectories import (
    LATENTS,
    PICTURES,
    FinishedLatents,
    Generated,
    RolloutRequest,
    Trajectories,
)
from models.schedulers.noise_keys import INITIAL_NOISE, draw, generators
from models.schedulers.solvers import DpmSolver

if TYPE_CHECKING:
    from models.config.algo import DiffusionRolloutAlgoConfig
    from models.config.pipeline import DiffusionPipelineConfig
    from models.schedulers.flow_match_sde import FlowMatchSDEDiscreteScheduler

    Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class Denoising:
    """A request on its way from noise to finished latents; whoever has the model's velocity takes it a step further.

    Args:
        scheduler: with timesteps set for `model_config.pipeline`; others on their way may share it.
        model_config: how it is sampled.
        request: what to sample.
        latents: [B, ...] to start from.

    Raises:
        ValueError: there is a window but no noise, or finished latents are wanted of it.

    Attributes:
        step: the next one.
        latents: [B, ...] before it.
    """

    def __init__(
        self,
        scheduler: "FlowMatchSDEDiscreteScheduler",
        model_config: DiffusionModelConfig,
        request: RolloutRequest,
        latents: Tensor,
    ):
        request.check_window(model_config.algo.noise_level)
        self._scheduler, self.model_config, self.request = scheduler, model_config, request
        self.step, self.latents = 0, latents
        self._path: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._means: list[Tensor] = []
        self._unconditional: list[Tensor] = []
        self._solver: DpmSolver | None = None
        self._sigmas: list[float] = []

    @property
    def timesteps(self) -> Tensor:
        """The timesteps of all steps, [T]."""
        return self._scheduler.timesteps

    def advance(self, velocity: Tensor, unconditional: Tensor | None) -> None:
        """Take the next step; both tensors [B, ...] as `velocity_field` gives them for it."""
        request, algo, step = self.request, self.model_config.algo, self.step
        explore = step in request.window
        if not explore and self.model_config.pipeline.solver == "dpm2":
            self.latents, self.step = self._solved(velocity), step + 1
            return
        self._solver = None  # what stands before a step with noise says nothing of the path after it
        if explore and step - 1 not in request.window:
            self._path.append(self.latents)
        self._scheduler._step_index = step
        output: Any = self._scheduler.step(
            velocity,
            self.timesteps[step],
            self.latents,
            generator=generators(request.keys, step) if explore else None,
            noise_level=algo.noise_level if explore else 0.0,
            sde_type=algo.sde_type,
            sde_options=getattr(algo, "sde_options", None),
        )
        self.latents, self.step = output.prev_sample, step + 1
        if explore:
            self._path.append(self.latents)
            self._log_probs.append(output.log_prob)
            if request.record_means:
                self._means.append(output.prev_sample_mean)
            if request.record_unconditional and unconditional is not None:
                self._unconditional.append(unconditional)

    def _solved(self, velocity: Tensor) -> Tensor:
        self._solver = self._solver or DpmSolver()
        # All at once: each number by itself would wait for the GPU.
        self._sigmas = self._sigmas or self._scheduler.sigmas.tolist()
        return self._solver.step(self.latents, velocity, *self._sigmas[self.step : self.step + 2])

    def recorded(self) -> Trajectories | FinishedLatents | None:
        """What the request asks to be recorded, after the last step: the window's trajectories or the finished latents,
        on the CPU, or None."""
        request = self.request
        if request.record_finished:
            return FinishedLatents(request.keys, request.prompts, request.prompt_index, self.latents.cpu())
        if not request.window:
            return None
        timesteps = self.timesteps[list(request.window)].expand(len(self.latents), -1)
        return Trajectories(
            keys=request.keys,
            prompts=request.prompts,
            prompt_index=request.prompt_index,
            window=request.window,
            latents=torch.stack(self._path, 1).cpu(),
            timesteps=timesteps.cpu().contiguous(),
            log_probs=torch.stack(self._log_probs, 1).cpu(),
            means=torch.stack(self._means, 1).cpu() if request.record_means else None,
            unconditional=torch.stack(self._unconditional, 1).cpu() if self._unconditional else None,
        )


@torch.no_grad()
def sample(
    adapter: type[DiffusionModelBase],
    module: nn.Module,
    scheduler: "FlowMatchSDEDiscreteScheduler",
    model_config: DiffusionModelConfig,
    request: RolloutRequest,
    device: torch.device | str,
    initial_latents: Tensor | None = None,
) -> Denoising:
    """Denoise one request; errors as `Denoising`.

    Args:
        scheduler: with timesteps set for `model_config.pipeline`.
        initial_latents: [B, ...] to start from; None draws them by the noise keys.

    Returns:
        the request after its last step.
    """
    if initial_latents is None:
        initial_latents = _noise_to_start_from(adapter, model_config, request, device)
    denoising = Denoising(scheduler, model_config, request, initial_latents)
    prompts, index = request.prompts.to(device, waiting=False), request.prompt_index.to(device)
    # An update that takes the recorded half as given computes the other one alone, and must find the same numbers.
    apart = request.record_unconditional
    velocity = velocity_field(adapter, module, model_config, prompts, index, one_pass=not apart)
    for timestep in denoising.timesteps:
        denoising.advance(*velocity(denoising.latents, timestep))
    return denoising


def _noise_to_start_from(
    adapter: type[DiffusionModelBase],
    model_config: DiffusionModelConfig,
    request: RolloutRequest,
    device: torch.device | str,
) -> Tensor:
    """By the noise keys, [B, ...]; that of the samples' prompt where `algo.init_same_noise` says so and the window's
    steps, which are each sample's own, tell them apart."""
    shared = getattr(model_config.algo, "init_same_noise", False) and request.window
    keys = [key.of_group() for key in request.keys] if shared else request.keys
    return draw(keys, INITIAL_NOISE, adapter.latent_shape(model_config), device)


def finite_rows(values: Tensor) -> Tensor:
    """Which rows [B] of [B, ...] hold no NaN and no infinity, on the same device."""
    rest = tuple(range(1, values.ndim))
    # NaN passes through both. A mask of all values would take memory, and as long again.
    return values.amax(rest).isfinite() & values.amin(rest).isfinite()


@dataclass(frozen=True)
class Drawn:
    """A request whose work a GPU has been given, down to its last picture; it may be at it still.

    Attributes:
        denoising: after its last step.
        pictures: [B, H, W, 3] uint8 on the device, or None.
        finite: [B], likewise; see `Generated`.
        denoised, decoded: when latents and pictures are there.
    """

    denoising: Denoising
    pictures: Tensor | None
    finite: Tensor
    denoised: Mark
    decoded: Mark


class Sampler:
    """A denoiser and a decoder that sample whole requests; every rollout engine ends in one.

    Two threads may ask for samples at a time: a GPU is given the second request's work while the first one's results
    are copied to the host, and by its thread wherever they go from there.

    Args:
        adapter: the model's family.
        module: its denoiser, or a callable that takes the denoiser's keyword arguments.
        vae: its decoder.
        model_config: which model, and how it is sampled by default.
        device: where both live.
        least: samples to which a validation's smaller batch is filled up with its own.
    """

    def __init__(
        self,
        adapter: type[DiffusionModelBase],
        module: Any,
        vae: nn.Module,
        model_config: DiffusionModelConfig,
        device: torch.device | str,
        least: int = 0,
    ):
        self.adapter, self.module, self.vae = adapter, module, vae
        self.model_config, self.device, self.least = model_config, device, least
        self._copies = SideStream(device)
        self._giving_work, self._copying = threading.Lock(), threading.Lock()
        self._schedulers: dict[DiffusionPipelineConfig, FlowMatchSDEDiscreteScheduler] = {}

    def produce(
        self,
        request: RolloutRequest,
        pipeline: "DiffusionPipelineConfig | None" = None,
        algo: "DiffusionRolloutAlgoConfig | None" = None,
    ) -> Generated:
        """Sample one request, and decode it if it asks for pictures.

        Args:
            request: what to sample.
            pipeline: how, if not as in the training rollout (validation).
            algo: how to explore, if not as in the settings.
        """
        config, count = self._config(pipeline, algo), len(request.keys)
        if (
            pipeline is not None and count < self.least
        ):  # in a training rollout the copies would be drawn each iteration
            request = request.filled_up(self.least)
        with self._giving_work:
            drawn = self._draw(sample(self.adapter, self.module, self._scheduler(config), config, request, self.device))
            self._copying.acquire()  # before the next request's work is given: results leave in this order
        try:
            made = self._copied(drawn)
        finally:
            self._copying.release()
        return made if len(request.keys) == count else made.first(count)

    def begin(
        self, request: RolloutRequest, pipeline: "DiffusionPipelineConfig", algo: "DiffusionRolloutAlgoConfig"
    ) -> Denoising:
        """A request before its first step, for whoever takes the steps one by one; arguments as `produce`."""
        config = self._config(pipeline, algo)
        noise = _noise_to_start_from(self.adapter, config, request, self.device)
        return Denoising(self._scheduler(config), config, request, noise)

    def finish(self, denoising: Denoising) -> Generated:
        """What a request wants after its last step."""
        return self._copied(self._draw(denoising))

    def _draw(self, denoising: Denoising) -> Drawn:
        """Have its pictures decoded, if it asks for any; a GPU is not waited for."""
        latents = denoising.latents
        pictures, finite = None, finite_rows(latents)
        denoised = Mark(self.device)
        if PICTURES in denoising.request.outputs:
            pictures, drawn = self._decoded(latents, denoising.model_config)
            finite = finite & drawn
        return Drawn(denoising, pictures, finite, denoised, Mark(self.device))

    def _copied(self, drawn: Drawn) -> Generated:
        """What a request wants, on the CPU. A GPU may be at the next request's work meanwhile."""
        denoising = drawn.denoising
        with self._copies.after(drawn.denoised):  # while the pictures are decoded
            kept = denoising.latents.cpu() if LATENTS in denoising.request.outputs else None
            recorded = denoising.recorded()
        with self._copies.after(drawn.decoded):
            pictures = None if drawn.pictures is None else drawn.pictures.cpu()
            finite = drawn.finite.cpu()  # after the others, so that it waits for nothing
        if isinstance(recorded, Trajectories):
            finite = finite & finite_rows(recorded.log_probs)
        return Generated(pictures, kept, recorded, finite)

    def generate(self, request: RolloutRequest, pipeline: "DiffusionPipelineConfig | None" = None) -> tuple[Any, Any]:
        """(pictures, what the request asks to be recorded) of `produce`."""
        made = self.produce(request, pipeline)
        return made.pictures, made.recorded

    def decode(self, latents: Tensor, model_config: DiffusionModelConfig | None = None) -> Tensor:
        """Finished latents [B, ...] to pictures [B, H, W, 3], uint8, on the CPU."""
        return self._decoded(latents, model_config or self.model_config)[0].cpu()

    @torch.no_grad()
    def _decoded(self, latents: Tensor, model_config: DiffusionModelConfig) -> tuple[Tensor, Tensor]:
        """Pictures, and which of them [B] are finite before they are uint8: both on the device, and nothing waits."""
        decoded = self.adapter.decode(self.vae, model_config, latents)
        return to_uint8(decoded), finite_rows(decoded)

    def _config(
        self, pipeline: "DiffusionPipelineConfig | None", algo: "DiffusionRolloutAlgoConfig | None"
    ) -> DiffusionModelConfig:
        own = self.model_config
        return replace(own, pipeline=pipeline or own.pipeline, algo=algo or own.algo)

    def _scheduler(self, config: DiffusionModelConfig) -> Any:
        if config.pipeline not in self._schedulers:
            scheduler = self.adapter.build_scheduler(config)
            self.adapter.set_timesteps(scheduler, config, str(self.device))
            self._schedulers[config.pipeline] = scheduler
        return self._schedulers[config.pipeline]
