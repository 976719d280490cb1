# SPDX-License-Identifier: Apache-2.0
"""Ray: the cluster that a run joins or starts, and whether it has room."""

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray.exceptions import AuthenticationError

from models.errors import no_room_for
from models.runtime import compile_cache, determinism
from tasks.actors.daemons import begun_daemons, needed_daemons
from tasks.actors.late_daemons import daemon_lives, waited_for
from tasks.actors.ray_address import ClusterError, require_listener
from tasks.actors.ray_files import keep_token_private, working_folder
from tasks.actors.watchdog import ROUNDS, end_family, marked, own_mark, watchdog
from tasks.actors.worker_forks import FORKS, VARIABLE, forked_environment, forks_for, set_up_at_once
from tasks.config.errors import ConfigError
from tasks.config.trainer import RayConfig
from tasks.system.files import free_on_disk
from tasks.system.signals import held_back, kept_from_below

log = logging.getLogger(__name__)


QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_WAIT_POLICY": "passive",  # idle OpenMP threads that spin starve the other actors of a small machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

# A worker runs its set-up before Ray has told it where the driver imports from.
cloudpickle.register_pickle_by_value(determinism)
cloudpickle.register_pickle_by_value(compile_cache)


WORKER_SETUP = "worker_process_setup_hook"
LATE = "timed out during startup"
"""Words of Ray's error where its daemon is not there in time."""
ROOM_TO_START = 2**20
"""Bytes on the disk of Ray's files, of which its start takes more."""
AGENTS_SECONDS = 2
"""For what Ray has started to end with it."""
LEAVING_SECONDS = 60.0
"""For Ray to hear that this process leaves, which it asks without a limit of its own: a machine that is there and does
not answer, or a network that is gone, would hold the process for ever."""
LET_GO_SECONDS = 20.0
"""For Ray to give up what it waits for once its daemons are killed."""
RAY_FILES = str(Path(ray.__file__).parent)


@dataclass(frozen=True)
class WorkerNeeds:
    """What the processes of a run's actors begin with, beside what the cluster is.

    Attributes:
        full_determinism: also one that is started again begins with
            `models.runtime.determinism.use_deterministic_algorithms`.
        compiles: it keeps compiled code, see `models.runtime.compile_cache`.
        compile_cache: where, if not in its default place.
    """

    full_determinism: bool = False
    compiles: bool = False
    compile_cache: str | None = None


def _worker_setup(folder: str | None, needs: WorkerNeeds) -> Callable[[], None]:
    """What a worker's process begins with. One of a cluster that was started elsewhere enters the driver's folder, from
    which a config's relative paths count."""

    # No object of this module goes along: it would be imported there.
    full_determinism, compiles, kept = needs.full_determinism, needs.compiles, needs.compile_cache

    def begin() -> None:
        if folder is not None:
            os.chdir(folder)
        if full_determinism:
            determinism.use_deterministic_algorithms()
        if compiles:
            compile_cache.use_compile_cache(kept)

    return begin


@contextmanager
def ray_cluster(
    config: RayConfig, needs: WorkerNeeds = WorkerNeeds(), uses_gpus: bool = False
) -> Iterator[Path | None]:
    """Join the cluster at RAY_ADDRESS, or start one here; disconnect (and end one started here) afterwards.

    A driver that is killed in between takes the one started here along, and Prefect's temporary server. The files of
    one started here are this user's alone, see `tasks.actors.ray_files`.

    Args:
        config: which cluster.
        needs: of the actors' processes.
        uses_gpus: does one of them have a GPU?

    Returns:
        the socket where forks are asked for, if workers are forks.

    Raises:
        ClusterError: the cluster at RAY_ADDRESS does not answer, or not to this process; or one that is started here
            is not there in time.
        ConfigError: a cluster is started here, and its workers could not keep compiled code.
        RayFilesError: Ray's files have no place, or others could read its token.
    """
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS")
    # Ray tells at every start that its token authentication is on, which is its default and stays so.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # Without "local" Ray would join any cluster that `ray start` has left on this machine.
    place: dict[str, Any] = {"address": "local", "num_cpus": config.num_cpus, "include_dashboard": False}
    environment: dict[str, Any] = {WORKER_SETUP: _worker_setup(os.getcwd() if address else None, needs)}
    if address:
        environment["env_vars"] = {name: os.environ[name] for name in QUIET_ENVIRONMENT}
        place = {"address": address}
    keep_token_private(makes_one=address is None)
    if address is None and needs.compiles:
        _make_compile_cache(needs.compile_cache)
    if address:
        require_listener(address)
        _tell_unread(config)
    with (
        nullcontext() if address else working_folder() as folder,
        watchdog(folder),
        forks_for(config, uses_gpus, folder) as forks,
    ):
        if folder is not None:
            place["_temp_dir"] = str(folder)
            place["_system_config"] = {"worker_niceness": config.worker_niceness}
        if forks is not None:
            environment |= forked_environment(forks)
            if folder is not None:  # what Ray starts beforehand is no fork, so that no actor would take it
                place["_system_config"] |= {"prestart_worker_first_driver": False}
        if address or forks or needs != WorkerNeeds():
            place["runtime_env"] = environment
        with _own_daemons_ended() as before:
            # Of Ctrl-C Ray sees to that itself.
            kept = kept_from_below(signal.SIGHUP)
            at_once = set_up_at_once() if forks else nullcontext()
            with _own_handler_of_sigterm(), kept, waited_for(before) as latest, at_once:
                _connect(config, address, place, before, latest)
            with needed_daemons(before):
                yield forks


def _tell_unread(config: RayConfig) -> None:
    """Say what of the config a cluster that was started elsewhere does not read; not in a run of a sweep whose workers
    are the sweep's forks, which has read it."""
    found = {name: getattr(config, name) for name in ("num_cpus", "worker_niceness", "forked_workers")}
    # Defaults, and no forks, which such a cluster has none of anyway: False is 0.
    given = [f"ray_init.{name} {value}" for name, value in found.items() if value not in (None, 0, "auto")]
    if given and VARIABLE not in os.environ:
        log.warning("without effect in this run, which joins the cluster at RAY_ADDRESS: %s", ", ".join(given))


def _make_compile_cache(folder: str | None) -> None:
    """Where the workers are to keep compiled code, on this machine: of one that cannot, Ray starts others for ever."""
    try:
        compile_cache.made_cache_folder(folder)
    except OSError as error:
        raise ConfigError(f"trainer.compile_cache, where compiled code is kept, cannot be used: {error}") from error


class LateStart(ClusterError):
    """Ray's daemon was not there in its time."""


def _connect(
    config: RayConfig, address: str | None, place: Mapping[str, Any], before: set[psutil.Process], latest: float
) -> None:
    """Join the cluster at the address, or start one: again where its daemon gave up, as on a host that was busy.

    Args:
        before: this process's children that are not of that cluster, to which daemons are added that are no more.
        latest: until when one is started again, by `time.monotonic`.

    Raises:
        ClusterError: there is none.
        OSError: Ray's disk is full.
    """
    while True:
        try:
            return _start_or_join(config, address, place)
        except LateStart as late:
            if daemon_lives(before) or time.monotonic() > latest:  # it has had all of its time
                raise
            log.warning("Ray's daemon waited in vain for its own programs, and is started again: %s", late.__cause__)
            _end_daemons(before)
            before.update(begun_daemons(before))


def _start_or_join(config: RayConfig, address: str | None, place: Mapping[str, Any]) -> None:
    """Once. Raises ClusterError, or OSError where Ray's disk is full."""
    try:
        ray.init(log_to_driver=config.log_to_driver, logging_level=logging.WARNING, **place)
    except (ConnectionError, AuthenticationError) as error:
        raise ClusterError(
            f"the Ray cluster at RAY_ADDRESS {address} cannot be joined ({error}): start it, unset RAY_ADDRESS, or, if "
            "it was started with a token, set RAY_AUTH_MODE=token and have the same token here"
        ) from error
    except Exception as error:  # the only kind that Ray has for it
        folder = place.get("_temp_dir")
        if folder is not None and free_on_disk(Path(folder)) < ROOM_TO_START:  # its daemons met it, and do not say so
            raise no_room_for(folder) from error
        if LATE not in str(error):
            raise
        raise LateStart(
            "Ray did not start on this machine within its time, as where other programs keep all cores busy: give the "
            "command again, or end some of them"
        ) from error


@contextmanager
def _own_daemons_ended() -> Iterator[set[psutil.Process]]:
    """Disconnect from Ray after the block, and kill what it has started on this machine, also where the start itself
    was interrupted; those children stay that were there before, which the block is given.

    Nothing of value is in any of its processes then. Ray would end its daemons one after the other, with a second for
    each to do so itself, and the agents of a raylet that is gone look for its head for a minute.
    """
    before = set(psutil.Process().children())
    try:
        yield before
    finally:
        with held_back():  # a second signal would leave some of them
            _end_daemons(before)


def _end_daemons(before: set[psutil.Process]) -> None:
    """Of Ray, but for those of these processes."""
    begun = filter(_is_of_ray, set(psutil.Process().children()) - before)
    family = {member for daemon in begun for member in _below(daemon)}
    ray._private.worker._global_node = None  # else `ray.shutdown` ends the daemons in its own way
    leaving = threading.Thread(target=_leave, daemon=True)
    leaving.start()
    leaving.join(LEAVING_SECONDS)
    if leaving.is_alive():
        log.warning("Ray does not answer at the end, and is left without a word after %g s", LEAVING_SECONDS)
    _take_sigterm_back()
    for _ in range(ROUNDS):  # and what a raylet has started before it ended
        family |= {*filter(_is_of_ray, marked(own_mark()))} - before
        if not family:
            break
        end_family(family, AGENTS_SECONDS)
        family = set()
    leaving.join(LET_GO_SECONDS)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)  # which would wait for this one
    _take_sigterm_back()


def _leave() -> None:
    """Disconnect from Ray, of which nothing is asked any more.

    A call that Ray may repeat, and whose worker ends with this connection, is called off before: Ray would want to tell
    its head of it, which no longer hears this process, and say so below what the run has said of its end.
    """
    try:
        if ray.is_initialized():
            core: Any = ray._private.worker.global_worker
            for name in core.core_worker.get_all_reference_counts():
                ray.cancel(ray.ObjectRef(bytes.fromhex(name.decode())))  # does nothing to what is already there
    finally:
        ray.shutdown()


def _take_sigterm_back() -> None:
    """From Ray's C++, which has given it to the system behind Python's back: it would end this process here and now."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _below(process: psutil.Process) -> list[psutil.Process]:
    """The process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _is_of_ray(process: psutil.Process) -> bool:
    """One of Ray's daemons, agents and workers, by its program, its arguments or the title it gave itself."""
    with suppress(psutil.NoSuchProcess):
        # A fork server has Ray's folder among its paths.
        words = [word for word in process.cmdline() if "multiprocessing" not in word]
        # A worker that was forked a moment ago has no title yet.
        return any(word.startswith("ray::") or RAY_FILES in word or word == FORKS for word in words)
    return False


@contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """The handler of before hears of SIGTERM, also within the block, and again at its end if it had no effect.

    `ray.init` would put one of its own in its place, which ends the process with 15 and leaves Ray's agents. And it
    forks: what a handler raises while Python runs the hooks of a fork is printed and lost.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():  # there Ray sets none
        yield
        return
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if callable(before):
            before(number, frame)

    rays = ray._private.utils
    set_handler, rays.set_sigterm_handler = rays.set_sigterm_handler, lambda handler: None
    signal.signal(signal.SIGTERM, note if callable(before) else before)
    try:
        yield
    finally:
        rays.set_sigterm_handler = set_handler
        signal.signal(signal.SIGTERM, before)
    if heard:
        signal.raise_signal(signal.SIGTERM)


def require_resources(gpus: float, cpus: float) -> None:
    """Check that the cluster has that many GPUs and CPUs in all; Ray itself would wait for them for ever.

    Raises:
        ClusterError: it has fewer.
    """
    there = ray.cluster_resources()
    require_gpus(gpus, there.get("GPU", 0.0), "the Ray cluster has")
    if cpus > there.get("CPU", 0.0):
        raise ClusterError(
            f"the rewards reserve {cpus:g} CPUs (num_workers x num_cpus of each of reward.functions) but the Ray "
            f"cluster has {there.get('CPU', 0.0):g}: lower them; 0 reserves none"
        )


def require_gpus(gpus: float, there: float, told: str) -> None:
    """Raise ClusterError where fewer GPUs are there than a run needs.

    Args:
        told: who has so many.
    """
    if gpus > there:
        raise ClusterError(
            f"the run needs {gpus:g} GPUs (trainer ranks, rollout.num_actors x num_gpus_per_actor x "
            "vllm_omni.tensor_parallel_size, each reward's num_workers x num_gpus, reward.reward_model.num_gpus and "
            f"data.text_encoder.num_gpus) but {told} {there:g}: lower them, or set trainer.device or "
            "data.text_encoder.device to cpu"
        )


def gpus_are_free() -> bool:
    """Has no run a GPU of the cluster? What a run has there Ray does not give to another one."""
    return ray.available_resources().get("GPU", 0.0) == ray.cluster_resources().get("GPU", 0.0)
