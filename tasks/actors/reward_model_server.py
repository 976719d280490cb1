# SPDX-License-Identifier: Apache-2.0
"""The actor whose process has a reward model's server below it, and the commands of the engines that serve.

It imports nothing of what the driver has; the driver's side is in `reward_model`.
"""

import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import ray

from models.errors import DoubleflowError
from tasks.actors.ray_files import keep_engines_sockets
from tasks.actors.server_log import ServerLog
from tasks.actors.watchdog import end_marked, own_mark, watchdog
from tasks.config.reward import RewardModelConfig
from tasks.rewards import served
from tasks.rewards.pretrained import content_digest
from tasks.rewards.served import ServedModel
from tasks.system.ports import LOOPBACK, free_port

FIELD = "reward.reward_model"
HOST = LOOPBACK
GUARD = Path(__file__).parent / "server_guard" / "doubleflow_server_guard.py"
POLL_SECONDS = 0.5
POLL_TIMEOUT = 5.0
ANSWER_SECONDS = 30.0
"""For a server that is up to say what it does, and for one that is on its way down to be gone."""
SLEEP_SECONDS = 600.0
"""For weights to leave a GPU, or to come back."""


class RewardModelError(DoubleflowError, RuntimeError):
    """The reward model's server did not start, or does not do what it was asked."""


class GivenUp(RewardModelError, served.NotServed):
    """The reward model's server did not start, or lives and does not sleep or wake up. It is not tried again: a try may
    take the whole start_timeout_s, or `SLEEP_SECONDS`."""


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


class RewardModelServer:
    """The actor: one server, which it starts, asks after, puts to sleep and ends."""

    def __init__(self, config: RewardModelConfig):
        self.config, self._key = config, secrets.token_urlsafe(32)
        self._lock, self._asleep, self._stopped = threading.Lock(), False, False
        self._process: subprocess.Popen | None = None
        self._port, self._version = 0, ""
        self._deaths: list[str] = []
        self._failure: str | None = None
        self._log = ServerLog(self._key)
        # One for all: each would read the machine's certificates. No proxy stands between this machine and itself, and
        # a connection that was kept could be one to a server that has ended.
        self._client = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        keep_engines_sockets()
        self._ends = ExitStack()
        self._ends.enter_context(watchdog())

    def node(self) -> str:
        """The machine that it is on."""
        return ray.get_runtime_context().get_node_id()

    def connection(self, doubted: ServedModel | None = None) -> ServedModel:
        """Where the server is, once it is up and awake. One that has died, or dies as it wakes up, is started again,
        once.

        Args:
            doubted: what this has returned before and gave the caller no scores: it may be on its way down.

        Raises:
            GivenUp: it does not start or wake up, or did not when somebody asked before.
            RewardModelError: it refuses to wake up, or was ended with the run.
        """
        with self._lock:
            self._log.trim()  # here: every call of a reward asks for the connection
            if self._failure is not None:
                raise GivenUp(self._failure)
            if doubted is not None and self._process is not None and doubted.url == self._url:
                self._await_verdict(self._process)
            if self._asleep:
                self._order("/wake_up")
                self._asleep = False
            if self._stopped:
                raise RewardModelError("the reward model's server was ended with its run")
            if self._process is None or self._process.poll() is not None:
                self._start()
            return ServedModel(self._url, served_name(self.config), self._version, self._key)

    @property
    def _url(self) -> str:
        return f"http://{HOST}:{self._port}/v1"

    def sleep(self) -> None:
        """Off its GPU, as one that dies meanwhile is, until somebody asks for its address.

        Raises:
            RewardModelError: it cannot.
        """
        with self._lock:
            if not self._asleep:
                self._asleep = self._order("/sleep?level=1&mode=wait")

    def pid(self) -> int | None:
        """The id of the server's first process; None before there is one."""
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
        """Returns once it answers; raises GivenUp where it does not."""
        before = None if self._process is None else f"code {self._process.poll()}; {self._log.reason()}"
        try:
            self._try_to_start()
        except RewardModelError as error:
            follows = "" if before is None else f" -- it was started because the one before had ended: {before}"
            raise self._give_up(f"{error}{follows}") from error
        if before is not None:
            self._deaths.append(before)

    def _give_up(self, why: str) -> GivenUp:
        """The error of whoever asks for the server, now and from now on; its whole log goes to the actor's own."""
        self._failure = why
        self._log.keep()
        return GivenUp(why)

    def _try_to_start(self) -> None:
        end_marked(own_mark())  # what a server has left behind that died, as vLLM's engine with the GPU's memory
        self._port = free_port()
        command = server_command(self.config, self._port)
        self._log.clear()
        try:
            self._process = subprocess.Popen(
                command,
                stdout=self._log.descriptor,
                stderr=self._log.descriptor,
                stdin=subprocess.DEVNULL,
                env=self._environment(),
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
                    f"{self.config.start_timeout_s:g}: raise it, or see {self._log.reason()}"
                )
            time.sleep(POLL_SECONDS)
        end_marked(own_mark())
        raise RewardModelError(
            f"the reward model's server ended with code {process.poll()} before it answered; {self._log.reason()}"
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
        """Raise RewardModelError where an engine answers whoever asks, as with a version that goes round the guard, or
        nobody any more."""
        if self.config.command:
            return
        for path in ("/health", "/v1/models"):
            url = f"http://{HOST}:{self._port}{path}"
            try:
                status = self._client.get(url, timeout=ANSWER_SECONDS).status_code
            except httpx.TransportError as error:
                end_marked(own_mark())
                raise RewardModelError(
                    f"the reward model's server answered, and then not to {path} ({error}); {self._log.reason()}"
                ) from error
            if status != 401:
                end_marked(own_mark())
                raise RewardModelError(
                    f"the reward model's server answers {path} without the run's secret, so everybody on this machine "
                    f"could use it: give a version of {self.config.engine} that docs/rewards.md names"
                )

    def _request(self, method: str, path: str, seconds: float) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._key}"}
        url = f"http://{HOST}:{self._port}{path}"
        return self._client.request(method, url, headers=headers, timeout=seconds)

    def _is_up(self) -> bool:
        """404 is an answer, too: a server without /health is asked for its models."""
        return any(self._answers(path) for path in ("/health", "/v1/models"))

    def _answers(self, path: str) -> bool:
        return self._request("GET", path, POLL_TIMEOUT).status_code == 200

    def _order(self, path: str) -> bool:
        """Has it done what is posted? Not one that has died, or dies meanwhile. Raises RewardModelError of one that
        lives and does not do it."""
        if self._process is None or self._process.poll() is not None:
            return False
        try:
            self._send(path)
        except GivenUp:
            raise
        except RewardModelError:
            self._await_verdict(self._process)
            if self._process.poll() is None:
                raise
            return False
        return True

    def _send(self, path: str) -> None:
        """POST what is to put it to sleep or to wake it. One that lives and does not answer is given up and ended: its
        weights may be on a GPU on which others count."""
        try:
            answer = self._request("POST", path, SLEEP_SECONDS)
        except httpx.TimeoutException as error:
            end_marked(own_mark())
            raise self._give_up(
                f"the reward model's server did not answer POST {path} within {SLEEP_SECONDS:g} s: set "
                f"reward.reward_model.sleep to false, or see {self._log.reason()}"
            ) from error
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


def _weights_version(config: RewardModelConfig) -> str:
    """A digest of a folder's weights, or a hub id's commit."""
    folder = Path(config.model_path)
    return content_digest(folder) if folder.is_dir() else str(config.revision)
