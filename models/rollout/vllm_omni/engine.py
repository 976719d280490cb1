# SPDX-License-Identifier: Apache-2.0
"""Sampling by vLLM-Omni: the same interface as `DiffusersRolloutEngine`, on an engine that batches requests."""

import asyncio
import importlib.util
import itertools
import os
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import transformer_config
from models.rollout.engine import WeightLoad
from models.rollout.vllm_omni import families  # noqa: F401  registers the project's own pipelines
from models.rollout.vllm_omni.answers import RolloutEngineError, agree, check_acknowledged, join_answers, reply
from models.rollout.vllm_omni.registry import VllmOmniPipelineBase
from models.rollout.vllm_omni.sample_request import EXTRA_ARG, SampleRequest, split, table_digest
from models.rollout.vllm_omni.weight_loads import FullLoad, LoraLoad
from models.samples.trajectories import Generated, RolloutRequest
from models.weights.buckets import buckets, export_handle, pack
from models.weights.canary import Canary
from models.weights.trainable import WeightSyncError, read_exported

if TYPE_CHECKING:
    from models.config.pipeline import DiffusionPipelineConfig
    from models.config.vllm_omni import VllmOmniConfig

T = TypeVar("T")
FIRST_PORT, PORTS = 20000, 10000
"""Below Linux's ephemeral ports."""
EXECUTOR = "models.rollout.vllm_omni.executor.BatchExecutor"


def pipeline_class(model_config: DiffusionModelConfig) -> Any:
    """The rollout pipeline of the model's architecture.

    Raises:
        ValueError: there is none, or vLLM-Omni is not installed here.
    """
    found = VllmOmniPipelineBase.get_class(model_config.architecture, model_config.algorithm)
    if found is None:
        raise ValueError(
            f"no vLLM-Omni pipeline for architecture {model_config.architecture!r} (algorithm "
            f"{model_config.algorithm!r}) of {model_config.path}: set rollout.name to diffusers"
        )
    missing = [name for name in ("vllm", "vllm_omni") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"rollout.name is vllm_omni, but {' and '.join(missing)} cannot be imported here: install it as "
            "docs/vllm-omni.md says, or set rollout.name to diffusers"
        )
    return found


def check_tensor_split(model_config: DiffusionModelConfig, size: int) -> None:
    """Raise where a model's attention cannot be divided among `size` processes; reads a config file only.

    Raises:
        ValueError: the heads do not divide.
    """
    transformer = transformer_config(model_config)
    heads = next((transformer[name] for name in ("num_attention_heads", "n_heads") if name in transformer), size)
    if heads % size:
        raise ValueError(
            f"rollout.vllm_omni.tensor_parallel_size is {size}, which does not divide the {heads} attention heads of "
            f"{model_config.architecture}: choose a divisor of them"
        )


class VllmOmniRolloutEngine:
    """One vLLM-Omni engine with the transformer and the decoder of a model.

    With tensor parallelism the model is in child processes, which die with this one.

    Its event loop runs in a thread of its own; the methods here block, are called one at a time, and raise in the
    caller what goes wrong in the engine.

    Args:
        model_config: which model, and how it is sampled by default.
        settings: of the engine.
        max_num_seqs: largest batch.
        sleep_mode: let `sleep` give the GPU's memory back.
    """

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        settings: "VllmOmniConfig",
        *,
        max_num_seqs: int,
        sleep_mode: bool = False,
    ):
        self.model_config, self.settings = model_config, settings
        self.adapter, self.pipeline = DiffusionModelBase.get_class(model_config), pipeline_class(model_config)
        # Read by vLLM-Omni, which leaves its own there for child processes to inherit: two workers of one driver would
        # then want one port. A process id is one worker's, and these numbers the system does not give away meanwhile.
        os.environ["MASTER_PORT"] = str(FIRST_PORT + os.getpid() % PORTS)
        self._numbers, self._asleep, self._given_up = itertools.count(1), False, 0
        self._lora: Any = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm-omni", daemon=True).start()
        self._engine: Any = self._wait(self._start(max_num_seqs, sleep_mode), timeout=None)

    async def _start(self, max_num_seqs: int, sleep_mode: bool) -> Any:
        from vllm_omni.entrypoints.async_omni import AsyncOmni

        settings = self.settings
        backend = {"diffusion_attention_backend": settings.attention_backend} if settings.attention_backend else {}
        arguments = {"pipeline_class": _path(self.pipeline), "model_config": dict(vars(self.model_config))}
        return AsyncOmni(
            model=self.model_config.path,
            dtype=self.model_config.model.dtype,
            enforce_eager=settings.enforce_eager,
            max_num_seqs=max_num_seqs,
            request_batch_max_wait_ms=settings.request_batch_max_wait_ms,
            custom_pipeline_args=arguments,
            worker_extension_cls="models.rollout.vllm_omni.worker.RolloutWorkerExtension",
            tensor_parallel_size=settings.tensor_parallel_size,
            distributed_executor_backend="uni" if settings.tensor_parallel_size == 1 else EXECUTOR,
            step_execution=settings.step_execution,
            enable_sleep_mode=sleep_mode,
            **backend,
        )

    # ---- sampling

    def produce(self, request: RolloutRequest, pipeline: "DiffusionPipelineConfig | None" = None) -> Generated:
        """Sample one request; see `Sampler.produce`.

        Raises:
            RolloutEngineError: the engine refused or failed, or took longer than `request_timeout_s`.
        """
        return self._wait(self._generate(request, pipeline or self.model_config.pipeline))

    def generate(self, request: RolloutRequest, pipeline: "DiffusionPipelineConfig | None" = None) -> tuple[Any, Any]:
        """(pictures, what the request asks to be recorded) of `produce`."""
        made = self.produce(request, pipeline)
        return made.pictures, made.recorded

    async def _generate(self, request: RolloutRequest, pipeline: "DiffusionPipelineConfig") -> Generated:
        request.check_window(self.model_config.algo.noise_level)
        if self._asleep:
            raise RolloutEngineError("the engine is asleep: wake it before it samples")
        # One that was given up drops its table when the engine answers again.
        table = f"{table_digest(request.prompts)}-{self._given_up}"
        await self._order("put_prompts", table, request.prompts)
        try:
            async with asyncio.TaskGroup() as group:
                samples = split(request, table, self.model_config, pipeline)
                running = [group.create_task(self._sample(sample)) for sample in samples]
        except ExceptionGroup as errors:  # `except*` would put what is raised here into a group again
            raise errors.exceptions[0] from None
        finally:
            await self._order("drop_prompts", table)
        return join_answers(request, [task.result() for task in running])

    async def _sample(self, sample: SampleRequest) -> Any:
        """vLLM-Omni's answer to one sample."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        pipeline = sample.pipeline
        parameters = OmniDiffusionSamplingParams(
            # What decides which requests share a batch.
            height=pipeline.height,
            width=pipeline.width,
            num_inference_steps=pipeline.num_inference_steps,
            true_cfg_scale=pipeline.true_cfg_scale,
            guidance_scale=pipeline.guidance_scale or 0.0,
            num_frames=pipeline.num_frames or 1,
            output_type="latent",  # no picture is made of what goes through its own post-processing
            seed=0,
            lora_request=self._lora,
            extra_args={EXTRA_ARG: sample},
        )
        name = f"sample-{next(self._numbers)}"
        given = self._engine.generate(prompt={"prompt": ""}, request_id=name, sampling_params_list=[parameters])
        answers = [answer async for answer in given]
        if not answers or answers[-1].error:
            raise RolloutEngineError(f"vLLM-Omni gave no picture: {answers and answers[-1].error}")
        return answers[-1]

    # ---- weights

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take the trainer's weights (names and shapes as `models.weights.trainable.trainable` gives them).

        Raises:
            WeightSyncError: they leave some of vLLM-Omni's own as they were.
        """
        load = self.begin_load()
        for bucket in buckets(weights.items()):
            load.take(bucket)
        load.finish()

    def begin_load(self) -> WeightLoad:
        """Take the trainer's weights piece by piece; errors as `load_weights`."""
        if self.model_config.trains_lora:
            return LoraLoad(lambda weights: self._wait(self._load_lora(weights)))
        return FullLoad(self.model_config.architecture, lambda weights: self._wait(self._put(weights)))

    async def _put(self, weights: dict[str, Tensor]) -> list[str]:
        """Copy some full weights; see `RolloutWorkerExtension.load_named_weights`."""
        if self.settings.tensor_parallel_size == 1:
            return await self._order("load_named_weights", weights)
        slots, flat = pack(weights)  # pickled, they would be copied for each process, and more than once
        return await self._order("load_shared_weights", slots, export_handle(flat))

    async def _load_lora(self, weights: Mapping[str, Tensor]) -> None:
        from models.rollout.vllm_omni.lora import lora_request

        targets = tuple(self.model_config.model.target_modules or self.adapter.lora_target_modules)
        request = lora_request(self.pipeline, self.model_config, targets, weights, next(self._numbers))
        if self._lora is not None:
            await self._order("remove_lora", self._lora.lora_int_id)
        if not await self._order("add_lora", request):
            raise WeightSyncError("vLLM-Omni did not take the LoRA weights")
        self._lora = request.name_only()

    def load_exported(self, folder: Path) -> None:
        """Take weights from a folder that a run exported."""
        self.load_weights(read_exported(self.adapter, self.model_config, folder))

    def held_weights(self) -> None:
        """vLLM-Omni puts several of the trainer's tensors into one, and LoRA matrices into slots of its own."""

    def canary_velocity(self, canary: Canary) -> Tensor:
        """What this copy of the model predicts for the canary, [S, n, ...] fp32 on the CPU (`canary_velocity`).

        Raises:
            WeightSyncError: its processes predict different things.
        """
        return agree(self._wait(self._order("rollout_canary", canary, self._lora))).clone()

    # ---- memory

    def sleep(self, with_policy: bool = True) -> None:
        """Move the weights off the GPU once the running batch is done. Nothing is sampled until `wake`.

        All of them, whatever is asked: vLLM-Omni keeps all in host memory or none.
        """
        self._wait(self._sleep())

    async def _sleep(self) -> None:
        if not self.settings.step_execution:  # which cannot be paused; calls come one at a time, so it is idle
            await self._engine.pause_generation(mode="keep")
        self._asleep = True
        check_acknowledged("sleep", await self._engine.sleep(level=1))

    def wake(self) -> None:
        """Bring the weights back; new ones may be loaded then."""
        self._wait(self._wake())

    async def _wake(self) -> None:
        check_acknowledged("wake", await self._engine.wake_up())
        if not self.settings.step_execution:
            await self._engine.resume_generation()
        self._asleep = False

    def shutdown(self) -> None:
        """End the engine and its thread."""
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ---- the engine's thread

    def _wait(self, work: Coroutine[Any, Any, T], timeout: float | None = 0) -> T:
        """The result of a coroutine on the engine's loop; a timeout of 0 is the settings'."""
        limit = self.settings.request_timeout_s if timeout == 0 else timeout
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(limit)
        except TimeoutError as error:
            running.cancel()  # its clean-up waits for the engine, which may hang: nobody waits for that
            self._given_up += 1
            raise RolloutEngineError(f"vLLM-Omni did not answer within request_timeout_s, {limit:g} s") from error
        except (RolloutEngineError, WeightSyncError, ValueError):
            raise
        except Exception as error:
            raise RolloutEngineError(f"vLLM-Omni failed: {str(error) or repr(error)}") from error

    async def _order(self, method: str, *arguments: Any) -> Any:
        """Ask the worker; its one answer. That of several ranks is rank 0's, and an error where it failed on any."""
        return reply(method, await self._engine.collective_rpc(method, args=arguments))


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
