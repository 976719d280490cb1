# SPDX-License-Identifier: Apache-2.0
"""A second training engine: one process, a plain module, torch's own autograd and files. No FSDP, no sharding."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.algorithms.losses import get_diffusion_loss_fn
from models.config.actor import DiffusionActorConfig, ForwardProcessConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.samples.trajectories import Trajectories
from models.training.engine import LOG_PROB_DISTANCES, HeldWeights
from models.training.micro_batches import ActorBatch, WeightedMetrics, micro_batch_of
from models.training.policy import PolicyForward
from models.weights.canary import Canary, canary_velocity
from models.weights.trainable import load_trainable, make_trainable, trainable

FILE = "state.pt"


class PlainEngine(PolicyForward):
    """Losses of the reverse process, no average, no KL: what the interface asks for and no more."""

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        actor_config: DiffusionActorConfig,
        device: str = "cpu",
        forward_config: ForwardProcessConfig | None = None,
        keeps_previous: bool = False,
    ):
        assert not keeps_previous, "this engine keeps no copies"
        self.model_config, self.actor_config, self.device = model_config, actor_config, device
        self.adapter = DiffusionModelBase.get_class(model_config)
        self.loss_fn = get_diffusion_loss_fn(actor_config.diffusion_loss.loss_mode, actor_config.diffusion_loss.options)
        self.reference = self.teacher = self.old_policy = None
        self.saving: Future | None = None

    def initialize(self) -> None:
        self.module: Any = self.adapter.load_transformer(self.model_config, torch.float32).to(self.device)
        make_trainable(self.adapter, self.module, self.model_config)
        self.scheduler = self.adapter.build_scheduler(self.model_config)
        settings = self.actor_config.optim
        self.optimizer = torch.optim.AdamW(
            trainable(self.module).values(), settings.lr, settings.betas, settings.eps, settings.weight_decay
        )
        self.steps = 0

    def update_policy(self, batches: Sequence[ActorBatch], epochs: int = 1) -> dict[str, float]:
        collected = WeightedMetrics()
        for batch in [*batches] * epochs:
            for samples, advantages in batch.cut(self.actor_config.micro_batch).parts:
                for step in range(samples.steps):
                    micro_batch, counted = micro_batch_of(samples.step(step), advantages, self.device)
                    loss, metrics = self.forward_step(micro_batch, self.loss_fn)
                    (loss * counted / (batch.global_count * samples.steps)).backward()
                    collected.add({n: v for n, v in metrics.items() if n not in LOG_PROB_DISTANCES}, counted)
            parameters = list(trainable(self.module).values())
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.actor_config.optim.clip_grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            collected.add({"grad_norm": norm.item()})
        return collected.combined() | {"optimizer_steps": self.steps}

    def rescored(self, trajectories: Trajectories, with_means: bool = False) -> Trajectories:
        found: list[dict[str, Tensor]] = []
        for step in range(trajectories.steps):
            micro_batch, _ = micro_batch_of(trajectories.step(step), torch.zeros(len(trajectories)), self.device)
            found.append(self.forward_step(micro_batch, None, forward_only=True)[0])
        means = torch.stack([one["prev_sample_mean"] for one in found], 1) if with_means else None
        return replace(trajectories, log_probs=torch.stack([one["log_probs"] for one in found], 1), means=means)

    def holding(self, which: HeldWeights) -> AbstractContextManager[None]:
        if which != "policy":
            raise ValueError(f"the trainer keeps no {which} weights")
        return nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu().clone() for name, parameter in trainable(self.module).items()}

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.gather_weights().items())

    def canary_velocity(self, canary: Canary) -> Tensor:
        return canary_velocity(self.adapter, self.module, self.model_config, canary, self.device)

    def save_checkpoint(self, folder: Path) -> None:
        torch.save(self._state(), folder / FILE)

    def start_saving(self, folder: Path) -> None:
        self.saving = ThreadPoolExecutor(1).submit(torch.save, deepcopy(self._state()), folder / FILE)

    def saving_finished(self) -> bool:
        if self.saving is None or not self.saving.done():
            return self.saving is None
        self.saving.result()
        self.saving = None
        return True

    def load_checkpoint(self, folder: Path) -> None:
        state = torch.load(folder / FILE)
        load_trainable(self.module, state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]

    def _state(self) -> dict[str, Any]:
        return {"weights": self.gather_weights(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}
