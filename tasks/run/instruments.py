# SPDX-License-Identifier: Apache-2.0
"""What is measured of a run's processes: their memory, and traces of what they do."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tasks.actors.actor_group import ActorGroup
from tasks.actors.memory import GIB, memory_metrics, resident_mb
from tasks.actors.profiling import collect_traces, start_traces
from tasks.config.trainer import ProfileConfig
from tasks.records.tracking import Tracker
from tasks.system.host_memory import free_bytes
from tasks.system.stopwatch import Stopwatch


def ask_memory(groups: Mapping[str, ActorGroup]) -> Callable[[], dict[str, float]]:
    """A function, for any thread, that waits for the host memory of the driver and of every actor, for what is free of
    this machine's, and for what the stages took of the GPUs, under memory/.

    The actors are asked at once and answer after what they do now: trainer ranks still copy the weights for rollout
    workers that will be started again, and nobody waits for it.
    """
    metrics = {"memory/driver_mb": resident_mb(), "memory/machine_free_gib": free_bytes() / GIB}
    asked = {name: group.ask_memory() for name, group in groups.items()}

    def answered() -> dict[str, float]:
        found = metrics.copy()
        for name, answers in asked.items():
            found |= memory_metrics(name, answers())
        return found

    return answered


@contextmanager
def profiled(
    groups: Mapping[str, ActorGroup],
    name: str,
    settings: ProfileConfig,
    iteration: int,
    tracker: Tracker,
    clock: Stopwatch,
) -> Iterator[None]:
    """Trace what `settings` ask for of the group `name` during the block, as artifacts of the iteration.

    Args:
        groups: of the run, by name.
        name: "rollout" or "trainer"; a run without that group has no traces of it.
    """
    group = groups.get(name)
    if iteration not in settings.iterations or group is None:
        yield
        return
    numbers = settings.ranks if name == "trainer" else settings.rollout_workers
    with clock.stage("profile"):
        actors = start_traces(group, numbers, settings)
    yield
    with clock.stage("profile"):  # an actor writes its trace out for as long as a large model's update takes, or longer
        for number, trace in collect_traces(actors).items():
            tracker.log_bytes(trace, f"profile/{iteration:06d}/{name}_{number}.json.gz")
