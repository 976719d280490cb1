# SPDX-License-Identifier: Apache-2.0
"""Ray: start-up and the groups of long-lived actors that hold the models."""

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from ray import cloudpickle
from ray.exceptions import AuthenticationError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from models.runtime import compile_cache, determinism
from tasks.actors.machines import Whereabouts
from tasks.actors.memory import ActorMemory, memory_of, peak_metrics
from tasks.actors.ray_address import ClusterError, require_listener
from tasks.actors.ray_files import keep_token_private, working_folder
from tasks.actors.waiting import get
from tasks.actors.watchdog import ROUNDS, end_family, marked, own_mark, watchdog
from tasks.actors.worker_forks import FORKS, forked_environment, forks_for, set_up_at_once, started_by_python
from tasks.config.trainer import RayConfig
from tasks.system.signals import passed_on

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
SLOT_LEASE_SECONDS = 90.0
"""After which the slots of a run that was killed are free; Prefect renews them while it lives."""


AGENTS_SECONDS = 2
"""For what Ray has started to end with it."""
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
        ClusterError: the cluster at RAY_ADDRESS does not answer, or not to this process.
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
    if address:
        require_listener(address)
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
        with _own_daemons_ended():
            try:
                with _own_handler_of_sigterm(), set_up_at_once() if forks else nullcontext():
                    ray.init(log_to_driver=config.log_to_driver, logging_level=logging.WARNING, **place)
            except (ConnectionError, AuthenticationError) as error:
                raise ClusterError(
                    f"the Ray cluster at RAY_ADDRESS {address} cannot be joined ({error}): start it, unset "
                    "RAY_ADDRESS, or, if it was started with a token, set RAY_AUTH_MODE=token and have the same token "
                    "here"
                ) from error
            yield forks


@contextmanager
def _own_daemons_ended() -> Iterator[None]:
    """Disconnect from Ray after the block, and kill what it has started on this machine, also where the start itself
    was interrupted.

    Nothing of value is in any of its processes then. Ray would end its daemons one after the other, with a second for
    each to do so itself, and the agents of a raylet that is gone look for its head for a minute.
    """
    before = set(psutil.Process().children())
    try:
        yield
    finally:
        begun = filter(_is_of_ray, set(psutil.Process().children()) - before)
        family = {member for daemon in begun for member in _below(daemon)}
        ray._private.worker._global_node = None  # else `ray.shutdown` ends the daemons in its own way
        ray.shutdown()
        for _ in range(ROUNDS):  # and what a raylet has started before it ended
            family |= {*filter(_is_of_ray, marked(own_mark()))} - before
            if not family:
                break
            end_family(family, AGENTS_SECONDS)
            family = set()


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


@contextmanager
def gpu_slots(config: RayConfig, gpus: float) -> Iterator[None]:
    """Hold a slot of `config.gpu_pool` for each GPU, so that two runs never share one; waits until they are free.

    The slots are a lease: those of a run that was killed are free again after a minute and a half.

    Raises:
        ClusterError: the pool is unknown, or smaller than what the run needs.
    """
    if config.gpu_pool is None or gpus == 0:
        yield
        return
    slots = math.ceil(gpus)
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(config.gpu_pool).limit
        except ObjectNotFound as error:
            raise ClusterError(
                f"ray_init.gpu_pool is {config.gpu_pool!r}, which Prefect does not know: make it with `prefect gcl "
                f"create {config.gpu_pool} --limit <GPUs>`"
            ) from error
    if slots > limit:
        raise ClusterError(f"the run needs {slots} GPUs but ray_init.gpu_pool {config.gpu_pool} has {limit} in all")
    with concurrency(config.gpu_pool, occupy=slots, strict=True, lease_duration=SLOT_LEASE_SECONDS):
        yield


def require_resources(gpus: float, cpus: float) -> None:
    """Check that the cluster has that many GPUs and CPUs in all; Ray itself would wait for them for ever.

    Raises:
        ClusterError: it has fewer.
    """
    there = ray.cluster_resources()
    if gpus > there.get("GPU", 0.0):
        raise ClusterError(
            f"the run needs {gpus:g} GPUs (trainer ranks, rollout.num_actors x num_gpus_per_actor x "
            "vllm_omni.tensor_parallel_size, each reward's num_workers x num_gpus, reward.reward_model.num_gpus and "
            f"data.text_encoder.num_gpus) but the Ray cluster has {there.get('GPU', 0.0):g}: lower them, or set "
            "trainer.device or data.text_encoder.device to cpu"
        )
    if cpus > there.get("CPU", 0.0):
        raise ClusterError(
            f"the rewards reserve {cpus:g} CPUs (num_workers x num_cpus of each of reward.functions) but the Ray "
            f"cluster has {there.get('CPU', 0.0):g}: lower them; 0 reserves none"
        )


def gpus_are_free() -> bool:
    """Has no run a GPU of the cluster? What a run has there Ray does not give to another one."""
    return ray.available_resources().get("GPU", 0.0) == ray.cluster_resources().get("GPU", 0.0)


GPU_SHARES = {1: 1.0, 2: 0.5, 3: 0.25}
"""Actors on a GPU -> what Ray counts for each of them; it limits nothing."""

NODE_LABEL = "ray.io/node-id"
WAIT_WARNING_S = 30


class RankPlaces:
    """One place for each trainer rank: as many on each machine, those of consecutive ranks together.

    A place is a GPU of its own, or on the CPU a claim to the machine that takes nothing of it. A rollout worker that
    is to share a rank's GPU, or to read its memory, goes to the rank's place, and text encoders that are to share a GPU
    to the first. Returns when the places are held.

    Args:
        machines: `trainer.nnodes`.
        ranks: on each, `trainer.n_gpus_per_node`.
        device: "cuda" or "cpu".
        actors: that a place takes: a rank alone, or others besides.

    Attributes:
        num_gpus: what an actor at a place asks for.

    Raises:
        ClusterError: too few machines are of that size.
    """

    def __init__(self, machines: int, ranks: int, device: str, actors: int = 1):
        on_gpus = device == "cuda"
        self.num_gpus = GPU_SHARES[actors] if on_gpus else 0.0
        # A group's parts must ask for something, and CPUs may all be reserved: a byte of memory is there always.
        kind = "GPU" if on_gpus else "memory"
        fitting = f"in({','.join(_machines_with(machines, ranks, on_gpus))})"
        if machines == 1:
            self._group = _held([{kind: 1}] * ranks, "STRICT_PACK", [fitting] * ranks)
            return
        # Parts of one GPU each, so that Ray gives every place one; but its spreading knows whole parts alone. So a
        # group of one part a machine finds out where there is room.
        finder = _held([{kind: ranks}] * machines, "STRICT_SPREAD", [fitting] * machines)
        chosen = placement_group_table(finder)["bundles_to_node_id"]
        remove_placement_group(finder)
        count = machines * ranks
        self._group = _held([{kind: 1}] * count, "PACK", [chosen[number // ranks] for number in range(count)])

    def place(self, number: int) -> PlacementGroupSchedulingStrategy:
        """For an actor that is rank `number`, or goes with it."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)


def _machines_with(machines: int, ranks: int, gpus: bool) -> list[str]:
    """Ids of the machines that have so many GPUs in all, used or not; or any CPU, which a head may be without."""
    kind, needed = ("GPU", ranks) if gpus else ("CPU", 0.0)
    sizes = {node["NodeID"]: node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]}
    fitting = [node for node, size in sizes.items() if size >= needed and size > 0]
    if len(fitting) < machines:
        size = f" with {ranks} GPUs each" if gpus else ""
        there = ", ".join(f"{size:g}" for size in sorted(sizes.values(), reverse=True))
        raise ClusterError(
            f"trainer.nnodes {machines} x trainer.n_gpus_per_node {ranks} asks for {machines} machines{size}, but the "
            f"Ray cluster has {len(fitting)} that will do ({kind}s of its machines: {there}): lower one of the two, or "
            "add machines"
        )
    return fitting


def _held(bundles: list[dict[str, float]], strategy: str, nodes: list[str]) -> PlacementGroup:
    """A placement group once it has its resources, which other runs may still hold."""
    selectors = [{NODE_LABEL: node} for node in nodes]
    group = placement_group(bundles, strategy=strategy, bundle_label_selector=selectors)
    waited = 0
    while not _is_held(group):
        if waited == WAIT_WARNING_S:
            log.warning("waiting for GPUs of the Ray cluster that others hold")
        waited += 1
    return group


def _is_held(group: PlacementGroup) -> bool:
    """Within a second, so that the run can be ended meanwhile."""
    with passed_on():
        return bool(group.wait(1))


class ActorGroup:
    """Actors of one class, started together and called in turn or all at once.

    CPU actors ask for no cores, unless told to: the stages of an iteration take turns on the same ones.

    Args:
        actor_class: a plain class; it becomes a Ray actor here.
        count: how many.
        num_gpus: GPUs, or a share of one, that each takes.
        arguments: the constructor's, the same for all.
        places: where actor i is, of these; without them Ray chooses.
        options: Ray's own: num_cpus, max_restarts and so on.

    Attributes:
        restarts: does Ray start an actor again that died, or whose machine is lost?
        whereabouts: of the actors.
    """

    def __init__(
        self,
        actor_class: type,
        count: int,
        num_gpus: float,
        arguments: Sequence[Any] = (),
        *,
        places: RankPlaces | None = None,
        **options: Any,
    ):
        remote: Any = ray.remote(actor_class)
        given = {"num_cpus": 0, "num_gpus": num_gpus} | started_by_python(options.get("num_cpus", 0)) | options
        where = [{} if places is None else {"scheduling_strategy": places.place(i)} for i in range(count)]
        # A handle has its methods of the class, at run time: a type checker knows none of them.
        self.actors: list[Any] = [remote.options(**given | place).remote(*arguments) for place in where]
        self.restarts = bool(given.get("max_restarts", 0))
        self.whereabouts = Whereabouts(self.actors)

    def __len__(self) -> int:
        return len(self.actors)

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` on every actor; the results in the actors' order. An actor's error is raised here."""
        return get([getattr(actor, method).remote(*arguments) for actor in self.actors])

    def memory(self, name: str) -> dict[str, float]:
        """memory/<name>_<number>_mb of every actor: what its process holds of its machine's memory; and what the stages
        since the last call took of its GPU at most, see `peak_metrics`."""
        patient = {"max_task_retries": -1} if self.restarts else {}  # its machine may just have been lost
        found: list[ActorMemory] = get(
            [actor.__ray_call__.options(**patient).remote(memory_of) for actor in self.actors]
        )
        self.whereabouts.refresh()
        resident = {f"memory/{name}_{number}_mb": actor.resident_mb for number, actor in enumerate(found)}
        return resident | peak_metrics(name, [actor.peaks for actor in found])
