# SPDX-License-Identifier: Apache-2.0
"""A model that rewards ask, `reward.reward_model`: its server is a process of a Ray actor of the run.

The server listens on 127.0.0.1 alone, at a port and with a secret that are made when it starts, and which one of the
project's engines asks for whatever is asked of it (`server_guard`). The actor starts it
again where it has died, and wakes it where it sleeps, whenever a reward's worker asks for its address: so a worker
holds no address for longer than a call, and asks again within one that got no scores. One that does not start, or
does not wake up, is not tried again, and is the run's error. Whatever ends the actor ends the server, by a watchdog of
the actor's own.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from models.import_paths import check_allowed_program
from tasks.actors.actor_group import ActorGroup
from tasks.actors.reward_model_server import FIELD, RewardModelServer, program
from tasks.actors.waiting import get
from tasks.config.errors import ConfigError
from tasks.config.reward import RewardConfig, RewardFunctionConfig, RewardModelConfig
from tasks.rewards import asks_reward_model
from tasks.rewards.pretrained import COMMIT

log = logging.getLogger(__name__)

STOP_SECONDS = 40.0


def _asking(config: RewardConfig) -> dict[str, RewardFunctionConfig]:
    """Label -> settings of the rewards that ask the run's model."""
    return {label: entry for label, (name, entry) in config.named().items() if asks_reward_model(name, **entry.options)}


def check_reward_model(config: RewardConfig) -> None:
    """What can be known to be wrong before anything is started.

    Raises:
        ConfigError: a reward asks for a model that is not served, or none asks for the one that is; or the model or the
            engine is not there.
        ModuleNotAllowed: this machine's setting does not allow the program.
    """
    asking, model = [*_asking(config)], config.reward_model
    if model is None:
        if asking:
            raise ConfigError(
                f"reward.functions.{asking[0]} has no base_url, and there is no reward.reward_model: give the address "
                "of a server and its model as options, or let the run serve a model with reward.reward_model.model_path"
            )
        return
    if not asking:
        raise ConfigError(
            f"reward.reward_model serves {model.model_path}, which no reward asks: leave base_url and model out of the "
            "options of one that does (judge_grade, judge_ocr), or leave reward.reward_model out"
        )
    check_allowed_server(model)
    is_folder = Path(model.model_path).is_dir()
    if not is_folder and not COMMIT.fullmatch(model.revision or ""):
        raise ConfigError(
            f"reward.reward_model.model_path {model.model_path} is no folder here, so it is a hub id, and revision is "
            f"{model.revision!r}: give the commit as revision, 40 hex digits, or a local folder"
        )
    if is_folder and model.revision is not None:
        raise ConfigError(
            f"reward.reward_model.model_path {model.model_path} is a folder, which has no revision: leave "
            "reward.reward_model.revision out"
        )
    if not model.command and not program(model).is_file():
        raise ConfigError(
            f"reward.reward_model.engine is {model.engine}, but there is no {program(model)}: give the Python of an "
            "environment that has it as reward.reward_model.python"
        )


def check_allowed_server(model: RewardModelConfig) -> None:
    """What the config has run is allowed: a program, or the engine's with arguments, of which some name code to load.

    Raises:
        ModuleNotAllowed: this machine's setting does not allow it.
    """
    if model.command:
        check_allowed_program(f"{FIELD}.command", model.command[0])
    elif model.python is not None:
        check_allowed_program(f"{FIELD}.python", str(model.python))
    elif model.arguments:
        check_allowed_program(f"{FIELD}.arguments", str(program(model)))


class RewardModel:
    """The driver's side of it.

    Args:
        config: its settings.
        workers: that ask it. All may wait for it to start, and it must still hear that it is to end.

    Attributes:
        group: the actor.
        name: by which the workers find it.
    """

    def __init__(self, config: RewardModelConfig, workers: int = 1):
        self.config = config
        self.name = f"reward-model-{uuid4().hex}"
        options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 2, "name": self.name}
        options["max_concurrency"] = 4 + workers
        self.group = ActorGroup(RewardModelServer, 1, config.num_gpus, (config,), **options)
        self._uses = 0

    @property
    def actor(self) -> Any:
        """Who knows the server's address."""
        return self.group.actors[0]

    def beside(self) -> dict[str, Any]:
        """Ray's options of a worker that asks it: the same machine, which alone can reach it."""
        node = get(self.actor.node.remote())
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}

    def wait(self) -> None:
        """Until it answers. Raises GivenUp where it does not."""
        get(self.actor.connection.remote())

    def begin_use(self) -> None:
        """Something is to be scored: one that sleeps begins to wake up."""
        self._uses += 1
        if self.config.sleep:
            self.actor.connection.remote()

    def end_use(self) -> None:
        """That is scored: with nothing else under way it is asleep, where it is to sleep, when this returns."""
        self._uses -= 1
        self.rest()

    def tell_deaths(self) -> None:
        """Warn of servers that ended and were started again since the last time."""
        with suppress(RayError):  # the actor's own end is told by whoever needs it
            for death in get(self.actor.deaths.remote()):
                log.warning(
                    "the reward model's server had ended and was started again; what it had not scored was asked "
                    "again, as often as retries of reward.functions says (%s)",
                    death,
                )

    def rest(self) -> None:
        """Put it to sleep, if it is to sleep and nothing is under way."""
        if self.config.sleep and not self._uses:
            get(self.actor.sleep.remote())

    def stop(self) -> None:
        """End the server; where its actor is gone, the actor's watchdog has ended it."""
        with suppress(RayError, GetTimeoutError):
            get(self.actor.stop.remote(), STOP_SECONDS)
        with suppress(RayError):
            ray.kill(self.actor)


@contextmanager
def served_reward_model(config: RewardConfig) -> Iterator[RewardModel | None]:
    """The run's reward model during the block, and None without one; it starts behind what else starts."""
    if config.reward_model is None:
        yield None
        return
    model = RewardModel(config.reward_model, sum(entry.num_workers for entry in _asking(config).values()))
    try:
        model.actor.connection.remote()
        yield model
    finally:
        model.stop()
