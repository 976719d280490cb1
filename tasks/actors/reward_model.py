# SPDX-License-Identifier: Apache-2.0
"""A model that rewards ask, `reward.reward_model`: its server is a process of a Ray actor of the run.

The server listens on 127.0.0.1 alone, at a port and with a secret that are made when it starts, and which one of the
project's engines asks for whatever is asked of it (`server_guard`). The actor starts it
again where it has died, and wakes it where it sleeps, whenever a reward's worker asks for its address: so a worker
holds no address for longer than a call, and asks again within one that got no scores. Whatever ends the actor ends the
server, by a watchdog of the actor's own.
"""

import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from models.errors import DoubleflowError
from models.import_paths import check_allowed_program
from tasks.actors.cluster import ActorGroup
from tasks.actors.waiting import get
from tasks.actors.watchdog import end_marked, own_mark, watchdog
from tasks.config.errors import ConfigError
from tasks.config.reward import RewardConfig, RewardModelConfig
from tasks.rewards import asks_reward_model, served
from tasks.rewards.pretrained import COMMIT, content_digest
from tasks.rewards.served import ServedModel

log = logging.getLogger(__name__)

HOST = served.LOOPBACK
GUARD = Path(__file__).parent / "server_guard" / "doubleflow_server_guard.py"
FIELD = "reward.reward_model"
POLL_SECONDS = 0.5
POLL_TIMEOUT = 5.0
ANSWER_SECONDS = 30.0
"""For a server that is up to say what it does, and for one that is on its way down to be gone."""
SLEEP_SECONDS = 600.0
"""For weights to leave a GPU, or to come back."""
STOP_SECONDS = 40.0
SHOWN_LINES, SHOWN_BYTES = 15, 4000
"""At most, of the server's log, in the error of one that did not start."""


class RewardModelError(DoubleflowError, RuntimeError):
    """The reward model's server did not start, or does not do what it was asked."""


@dataclass(frozen=True)
class Engine:
    """How a library serves a model.

    Attributes:
        program: beside the environment's Python.
        arguments: of a model, with {model}, {host}, {port} and {name} to be filled in.
        revision: arguments for a hub id's commit, and how {model} is then written.
        sleeping: arguments for one that is to sleep.
        key: environment variable in which it looks for a secret of its own accord; None where it asks for none.
        environment: what it finds there where it is to sleep.
        is_guarded: is the guard run as the program, and the engine's by the guard?
    """

    program: str
    arguments: tuple[str, ...]
    revision: tuple[str, ...] = ()
    sleeping: tuple[str, ...] = ()
    key: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    is_guarded: bool = False


ENGINES = {
    "vllm": Engine(
        "vllm",
        # Its own key leaves /invocations, /tokenize and, where it sleeps, /collective_rpc open to everybody.
        (
            *("serve", "{model}", "--host", "{host}", "--port", "{port}", "--served-model-name", "{name}"),
            *("--middleware", f"{GUARD.stem}.Guard"),
        ),
        revision=("--revision", "{revision}"),
        sleeping=("--enable-sleep-mode",),
        key="VLLM_API_KEY",
        environment=(("VLLM_SERVER_DEV_MODE", "1"),),  # which is what offers /sleep
    ),
    "transformers": Engine(
        "transformers", ("serve", "{name}", "--host", "{host}", "--port", "{port}"), is_guarded=True
    ),
}


def program(config: RewardModelConfig) -> Path:
    """The engine's, in its environment."""
    return _python(config).with_name(ENGINES[config.engine].program)


def _python(config: RewardModelConfig) -> Path:
    """Of the engine's environment; not resolved, as a link's place tells the environment."""
    return Path(config.python or sys.executable).absolute()


def served_name(config: RewardModelConfig) -> str:
    """What the server calls the model."""
    at_commit = config.engine == "transformers" and config.revision is not None and not config.command
    return f"{config.model_path}@{config.revision}" if at_commit else config.model_path


def server_command(config: RewardModelConfig, port: int) -> list[str]:
    """What starts the server; the secret is in its environment, where other users cannot read it."""
    words: Sequence[str] = config.command
    if not words:
        engine = ENGINES[config.engine]
        revision = engine.revision if config.revision is not None else ()
        sleeping = engine.sleeping if config.sleep else ()
        start = (str(_python(config)), str(GUARD)) if engine.is_guarded else ()
        words = (*start, str(program(config)), *engine.arguments, *revision, *sleeping)
    values = {"model": config.model_path, "revision": config.revision or "", "name": served_name(config)}
    values |= {"host": HOST, "port": str(port)}
    filled = [re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), word) for word in words]
    return [*filled, *config.arguments]


def check_reward_model(config: RewardConfig) -> None:
    """What can be known to be wrong before anything is started.

    Raises:
        ConfigError: a reward asks for a model that is not served, or none asks for the one that is; or the model or the
            engine is not there.
        ModuleNotAllowed: this machine's setting does not allow the program.
    """
    asking = [label for label, (name, entry) in config.named().items() if asks_reward_model(name, **entry.options)]
    model = config.reward_model
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


class RewardModelServer:
    """The actor: one server, which it starts, asks after, puts to sleep and ends."""

    def __init__(self, config: RewardModelConfig):
        self.config, self._key = config, secrets.token_urlsafe(32)
        self._lock, self._asleep, self._stopped = threading.Lock(), False, False
        self._process: subprocess.Popen | None = None
        self._port, self._version = 0, ""
        self._deaths: list[str] = []
        self._log, path = tempfile.mkstemp()
        os.unlink(path)  # whoever is killed, nothing of it stays
        self._ends = ExitStack()
        self._ends.enter_context(watchdog())

    def node(self) -> str:
        """The machine that it is on."""
        return ray.get_runtime_context().get_node_id()

    def connection(self, doubted: ServedModel | None = None) -> ServedModel:
        """Where the server is, once it is up and awake.

        Args:
            doubted: what this has returned before and gave the caller no scores: it may be on its way down.

        Raises:
            RewardModelError: it does not start, or does not wake up.
        """
        with self._lock:
            if doubted is not None and self._process is not None and doubted.url == self._url:
                self._await_verdict(self._process)
            if self._stopped:
                raise RewardModelError("the reward model's server was ended with its run")
            if self._process is None or self._process.poll() is not None:
                self._start()
            if self._asleep:
                self._send("/wake_up")
                self._asleep = False
            return ServedModel(self._url, served_name(self.config), self._version, self._key)

    @property
    def _url(self) -> str:
        return f"http://{HOST}:{self._port}/v1"

    def sleep(self) -> None:
        """Off its GPU, until somebody asks for its address. Raises RewardModelError where it cannot."""
        with self._lock:
            if self._process is not None and self._process.poll() is None and not self._asleep:
                self._send("/sleep?level=1&mode=wait")
                self._asleep = True

    def is_sleeping(self) -> bool:
        """What the server itself says."""
        return bool(self._request("GET", "/is_sleeping", ANSWER_SECONDS).json()["is_sleeping"])

    def pid(self) -> int | None:
        """Of the server's first process."""
        return None if self._process is None else self._process.pid

    def deaths(self) -> list[str]:
        """How servers ended that were started again, since this was last asked."""
        told, self._deaths = self._deaths, []
        return told

    def stop(self) -> None:
        """End the server, also one that is starting; it is not started again."""
        self._stopped = True
        end_marked(own_mark())
        self._ends.close()

    def _start(self) -> None:
        """Returns once it answers."""
        if self._process is not None:
            self._deaths.append(f"code {self._process.poll()}; the end of its log: {self._last_lines() or 'empty'}")
        end_marked(own_mark())  # what a server has left behind that died, as vLLM's engine with the GPU's memory
        self._port, self._asleep = _free_port(), False
        command = server_command(self.config, self._port)
        os.lseek(self._log, 0, os.SEEK_SET)
        os.truncate(self._log, 0)
        try:
            self._process = subprocess.Popen(
                command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, env=self._environment()
            )
        except OSError as error:
            raise RewardModelError(f"the reward model's server {command[0]} cannot be started: {error}") from error
        self._await_answer(self._process)
        self._check_guarded()
        self._version = self._version or _weights_version(self.config)

    def _environment(self) -> dict[str, str]:
        engine, config = ENGINES[self.config.engine], self.config
        given = {served.KEY: self._key}
        if not config.command:
            given |= {engine.key: self._key} if engine.key else {}
            given |= dict(engine.environment) if config.sleep else {}
            path = os.environ.get("PYTHONPATH")
            given["PYTHONPATH"] = os.pathsep.join(filter(None, (path, str(GUARD.parent))))
        if not config.num_gpus:
            given["CUDA_VISIBLE_DEVICES"] = ""
        return {**os.environ, **given}

    def _await_answer(self, process: subprocess.Popen) -> None:
        deadline = time.monotonic() + self.config.start_timeout_s
        while process.poll() is None and not self._stopped:
            with suppress(httpx.TransportError):
                if self._is_up():
                    return
            if time.monotonic() > deadline:
                end_marked(own_mark())
                raise RewardModelError(
                    f"the reward model's server did not answer within reward.reward_model.start_timeout_s "
                    f"{self.config.start_timeout_s:g}: raise it, or see the end of its log: {self._last_lines()}"
                )
            time.sleep(POLL_SECONDS)
        end_marked(own_mark())
        raise RewardModelError(
            f"the reward model's server ended with code {process.poll()} before it answered; the end of its log: "
            f"{self._last_lines()}"
        )

    def _await_verdict(self, process: subprocess.Popen) -> None:
        """Until the server answers, or has ended: its connections may be gone a while before it is. One that does
        neither hangs, which is left to whoever asks it."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while process.poll() is None and not self._stopped and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if self._is_up():
                    return
            time.sleep(POLL_SECONDS)

    def _check_guarded(self) -> None:
        """Raise RewardModelError where an engine answers whoever asks, as with a version that goes round the guard."""
        if self.config.command:
            return
        for path in ("/health", "/v1/models"):
            url = f"http://{HOST}:{self._port}{path}"
            if httpx.get(url, timeout=ANSWER_SECONDS, trust_env=False).status_code != 401:
                end_marked(own_mark())
                raise RewardModelError(
                    f"the reward model's server answers {path} without the run's secret, so everybody on this machine "
                    f"could use it: give a version of {self.config.engine} that docs/rewards.md names"
                )

    def _request(self, method: str, path: str, seconds: float) -> httpx.Response:
        """No proxy stands between this machine and itself."""
        headers = {"Authorization": f"Bearer {self._key}"}
        url = f"http://{HOST}:{self._port}{path}"
        return httpx.request(method, url, headers=headers, timeout=seconds, trust_env=False)

    def _is_up(self) -> bool:
        """404 is an answer, too: a server without /health is asked for its models."""
        return any(self._answers(path) for path in ("/health", "/v1/models"))

    def _answers(self, path: str) -> bool:
        return self._request("GET", path, POLL_TIMEOUT).status_code == 200

    def _send(self, path: str) -> None:
        """POST what is to put it to sleep or to wake it."""
        try:
            answer = self._request("POST", path, SLEEP_SECONDS)
        except httpx.TransportError as error:
            raise RewardModelError(f"the reward model's server does not answer POST {path}: {error}") from error
        if answer.status_code == 404:
            raise RewardModelError(
                f"the reward model's server does not offer {path}: set reward.reward_model.sleep to false"
            )
        if not answer.is_success:
            raise RewardModelError(
                f"the reward model's server answers POST {path} with {answer.status_code}: {answer.text[:200]}"
            )

    def _last_lines(self) -> str:
        size = os.fstat(self._log).st_size
        last = os.pread(self._log, SHOWN_BYTES, max(0, size - SHOWN_BYTES)).decode(errors="replace")
        lines = last.replace(self._key, "***").splitlines()
        return " | ".join(line.strip() for line in lines[-SHOWN_LINES:] if line.strip())


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
        """Until it answers. Raises RewardModelError where it does not."""
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
    asking = [entry for name, entry in config.named().values() if asks_reward_model(name, **entry.options)]
    model = RewardModel(config.reward_model, sum(entry.num_workers for entry in asking))
    try:
        model.actor.connection.remote()
        yield model
    finally:
        model.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _weights_version(config: RewardModelConfig) -> str:
    """A digest of a folder's weights, or a hub id's commit."""
    folder = Path(config.model_path)
    return content_digest(folder) if folder.is_dir() else str(config.revision)
