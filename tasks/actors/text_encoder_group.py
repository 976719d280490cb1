# SPDX-License-Identifier: Apache-2.0
"""The run's text encoders as the driver sees them: prompts out, their embeddings back."""

import logging
from collections.abc import Callable, Sequence
from math import inf

from tasks.actors.actor_group import ActorGroup
from tasks.actors.rank_places import RankPlaces
from tasks.actors.text_encoder import TextEncoder
from tasks.actors.waiting import get
from tasks.config.data import TextEncoderConfig
from tasks.data.embeddings import Row
from tasks.data.prompts import Prompt
from tasks.data.text_encoding import EncodingSettings

log = logging.getLogger(__name__)

IN_A_CALL = 64
"""Prompts, about: what a call answers is in Ray's object store and in the driver at a time."""


class TextEncoderGroup:
    """The run's text encoders as the driver sees them: one process, which Ray starts again if it dies.

    Args:
        model: folder in diffusers format.
        config: where they are.
        settings: how they encode.
        places: those of the trainer's ranks, of which they share the first if they are colocated.
    """

    def __init__(
        self, model: str, config: TextEncoderConfig, settings: EncodingSettings, places: RankPlaces | None = None
    ):
        self.config = config
        shared = places if config.is_colocated else None
        self.group = ActorGroup(
            TextEncoder,
            1,
            config.own_gpus if shared is None else shared.num_gpus,
            (model, settings, config.batch_size, config.sleeps, config.too_long),
            places=shared,
            max_restarts=config.max_restarts,
            max_task_retries=-1 if config.max_restarts else 0,
        )
        self._told = False

    def check(self, prompts: Sequence[Prompt], seconds: float = inf) -> None:
        """Wait until the models are loaded, so many seconds at most, and tell which prompts are cut.

        Raises:
            DatasetError: a prompt is too long for them, and to be refused.
            NotLoaded: they are not loaded in time.
        """
        (cut,) = self.group.wait_loaded("text encoder", seconds, "check", prompts)
        self._tell(cut)

    def encode(self, prompts: Sequence[Prompt]) -> list[Row]:
        """See `TextEncoder.encode`; afterwards they sleep, where they do."""
        (actor,) = self.group.actors
        rows: list[Row] = []
        for part in self._calls(prompts):
            rows += get(actor.encode.remote(part))
        self._tell_first_cut()
        if self.config.sleeps:
            get(actor.sleep.remote())
        return rows

    def start(self, prompts: Sequence[Prompt]) -> Callable[[], list[Row]]:
        """Have them encoded in the same calls as `encode`, and return at once; call what this gives for the rows.

        Not for text encoders that sleep: somebody else has the GPU's memory meanwhile.
        """
        (actor,) = self.group.actors
        asked = [actor.encode.remote(part) for part in self._calls(prompts)]

        def rows() -> list[Row]:
            encoded = [row for call in asked for row in get(call)]
            self._tell_first_cut()
            return encoded

        return rows

    def _tell_first_cut(self) -> None:
        """Of prompts that `check` did not have, such as rewritten ones."""
        if self.config.too_long == "cut" and not self._told:
            (actor,) = self.group.actors
            self._tell(get(actor.first_cut.remote()))

    def _tell(self, cut: str) -> None:
        """Once in a run, however many are cut later."""
        if cut and not self._told:
            log.warning("data.text_encoder.too_long is cut; %s", cut)
            self._told = True

    def _calls(self, prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
        size = max(IN_A_CALL // self.config.batch_size, 1) * self.config.batch_size
        return [prompts[start : start + size] for start in range(0, len(prompts), size)]
