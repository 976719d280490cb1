# SPDX-License-Identifier: Apache-2.0
"""Machines of the cluster that are lost while a run has actors on them: what is said, and what ends the run.

Ray starts an actor elsewhere once it knows that its machine is gone. That takes it up to a minute, in which calls fail
because the actor does not answer. Whoever calls has to tell that from a worker that died. One that is started again may
hang while it loads (`tasks.actors.loading`).
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from models.errors import DoubleflowError
from tasks.actors.loading import LoadWatch, NotLoaded

POLL_S = 2.0
ANSWER_S = 5.0
"""A process that is gone is known to be by then; one that computes has not answered."""
VERDICT_S = 180
"""Ray has declared a machine dead by then, or has not lost it."""
REMINDER_S = 60

Actor = tuple[str, int]
"""The name of a group, and which of its actors."""


class MachineLost(DoubleflowError, RuntimeError):
    """A machine is lost with a part of the run that cannot be started elsewhere."""


def machine_of(_actor: Any) -> str:
    """Id of the machine that an actor is on."""
    return ray.get_runtime_context().get_node_id()


def lost_machines() -> dict[str, str]:
    """Id -> name of the machines that the cluster has lost."""
    return {node["NodeID"]: _name(node) for node in ray.nodes() if not node["Alive"]}


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


class Whereabouts:
    """Which machine each actor of a group is on, as far as it has answered."""

    def __init__(self, actors: Sequence[Any]):
        self.actors = actors
        self._asked: list[ray.ObjectRef] = []
        self._last: list[str | None] = [None] * len(actors)
        self.refresh()

    def refresh(self) -> None:
        """Ask all again, for Ray may have started one elsewhere."""
        self._asked = [self._ask(number) for number in range(len(self.actors))]

    def _ask(self, number: int, patient: bool = True) -> ray.ObjectRef:
        """Of one that is not there an error; if `patient`, once it is known that it will not be started again."""
        return self.actors[number].__ray_call__.options(max_task_retries=-1 if patient else 0).remote(machine_of)

    def machine(self, number: int) -> str | None:
        """The machine that an actor is on; None of one that has not answered yet."""
        ready, _ = ray.wait([self._asked[number]], timeout=0)
        if not ready:
            return None
        try:
            self._last[number] = ray.get(ready[0])
        except RayError:  # of the actor itself: its other calls raise it
            return None
        return self._last[number]

    def last(self, number: int) -> str | None:
        """The machine that an actor was on when it last answered."""
        return self.machine(number) or self._last[number]

    def ask_again(self, number: int) -> None:
        """Ask an actor whose machine is lost: it has to answer from another one."""
        self._asked[number] = self._ask(number)

    def lost(self, number: int, machine: str | None) -> str | None:
        """Name of the machine that an actor was on, if that is lost; waits until Ray knows, or the actor answers.

        Args:
            machine: where the actor had last answered from when the call that failed was made; None if nowhere yet.
        """
        asked = self._ask(number)
        before = machine or self.last(number) or ""
        while True:
            answered = ray.wait([asked], timeout=POLL_S)[0]  # it is there, or is dead for good
            name = lost_machines().get(before)
            if name is not None and self.machine(number) == before:
                self.ask_again(number)
            if name is not None or answered:
                return name

    def gone(self) -> dict[int, ray.ObjectRef]:
        """The actors that have no process any more, with a question that Ray answers once it knows what of them is."""
        asked = [self._ask(number, patient=False) for number in range(len(self.actors))]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
        return {number: self._ask(number) for number, ref in enumerate(asked) if ref in ready and _fails(ref)}


def _fails(answer: ray.ObjectRef) -> bool:
    try:
        ray.get(answer)
    except RayActorError:
        return True
    return False


class Placed(Protocol):
    """A group of actors, as far as the machines that they are on go; `tasks.actors.actor_group.ActorGroup` is one."""

    actors: list[Any]
    restarts: bool
    whereabouts: Whereabouts

    def __len__(self) -> int:
        """How many actors it has."""


class MachineLog:
    """Tells which machines are lost, what was on them, and when it is back; of what others have seen, look by look.

    An actor may come back between two looks, so that the first one to find its machine lost finds it elsewhere already:
    it was on the machine where the look before had seen it.

    Args:
        restarts: of each group, by name: does Ray start its actors elsewhere?
        log: where it is said.

    Attributes:
        count: of the lost machines that the run was on.
    """

    def __init__(self, restarts: Mapping[str, bool], log: "logging.Logger | logging.LoggerAdapter[Any]"):
        self.restarts, self.log = restarts, log
        self.count = 0
        self._lost: set[str] = set()
        self._seen: dict[Actor, str] = {}
        self._away: dict[Actor, float] = {}

    def tell(self, places: Mapping[Actor, str | None], lost: Mapping[str, str]) -> list[Actor]:
        """Tell what is new since the last look.

        Args:
            places: the machine that each actor was on when it last answered; None of one that never did.
            lost: id -> name of the lost machines. Asked for after `places`, it names the machine of all that is back
                elsewhere: Ray takes a machine for lost before it starts its actors again.

        Returns:
            The actors that will be started elsewhere and have not answered from there.
        """
        gone: list[Actor] = []
        for machine in lost.keys() - self._lost:
            held = [actor for actor, place in places.items() if machine in (place, self._seen.get(actor))]
            if held:
                gone += self._tell_lost(lost[machine], held)
        self._lost |= lost.keys()
        self._seen |= {actor: place for actor, place in places.items() if place is not None}
        self._tell_back(lost)
        return [actor for actor in gone if self._seen[actor] in lost]

    def _tell_lost(self, machine: str, held: Sequence[Actor]) -> list[Actor]:
        """Returns those that will be started elsewhere."""
        self.count += 1
        away = [actor for actor in held if self.restarts[actor[0]]]
        self._away |= dict.fromkeys(away, time.monotonic())
        told = f"machine lost: {machine}, and with it {', '.join(map(_title, held))}"
        again = f"; {', '.join(map(_title, away))} will be started elsewhere, to do again what was not finished"
        self.log.warning("%s%s", told, again if away else "")
        return away

    def _tell_back(self, lost: Collection[str]) -> None:
        for actor, since in list(self._away.items()):
            if self._seen[actor] not in lost:
                del self._away[actor]
                self.log.warning("%s is back, on another machine", _title(actor))
            elif time.monotonic() - since > REMINDER_S:
                self._away[actor] = time.monotonic()
                self.log.warning("%s is not back yet: it waits for room on a machine of the cluster", _title(actor))


class MachineWatch:
    """Looks which machines are lost, as a thread, for the driver only waits then; a `MachineLog` says what is new.

    Args:
        groups: of the run, by name.
        log: where it is said.
        load_seconds: what an actor that is started again has to load.

    Attributes:
        loads: looks at those.
    """

    def __init__(
        self,
        groups: Mapping[str, Placed],
        log: "logging.Logger | logging.LoggerAdapter[Any]",
        load_seconds: float = inf,
    ):
        self.groups, self.log, self.loads = groups, log, LoadWatch(load_seconds)
        self._told = MachineLog({name: group.restarts for name, group in groups.items()}, log)
        self._metered = 0
        self.look()  # the next one has to know where everything was
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Before the driver leaves the cluster."""
        self._ended.set()
        self._thread.join(5 * POLL_S)

    def metrics(self) -> dict[str, float]:
        """machines/lost since the last time, of machines that the run was on; nothing where none is."""
        counted = self._told.count
        new, self._metered = counted - self._metered, counted
        return {"machines/lost": float(new)} if new else {}

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            try:
                self.look()
            except RayError as error:  # the head is gone, and every call of the driver's says so
                self.log.warning("the cluster's machines cannot be watched any more: %s", error)
                return

    def look(self) -> None:
        """Tell what is new."""
        places = {actor: self.groups[actor[0]].whereabouts.last(actor[1]) for actor in self._actors()}
        for name, number in self._told.tell(places, lost_machines()):
            self.groups[name].whereabouts.ask_again(number)
        again = {name: group for name, group in self.groups.items() if group.restarts}
        self.loads.look({_title((n, i)): actor for n, group in again.items() for i, actor in enumerate(group.actors)})

    def _actors(self) -> Iterator[Actor]:
        for name, group in self.groups.items():
            yield from ((name, number) for number in range(len(group)))

    def verdict(self) -> str | None:
        """The machine that is lost with actors that are not started again, and which; None where that did not happen.

        Waits until Ray knows, where a process is gone.
        """
        fixed = {name: group for name, group in self.groups.items() if not group.restarts}
        gone = {(name, i): asked for name, group in fixed.items() for i, asked in group.whereabouts.gone().items()}
        deadline = time.monotonic() + VERDICT_S
        while gone and time.monotonic() < deadline:
            settled = ray.wait(list(gone.values()), timeout=POLL_S)[0]
            lost = lost_machines()
            places = {actor: fixed[actor[0]].whereabouts.last(actor[1]) for actor in gone}
            held = {actor: place for actor, place in places.items() if place in lost}
            if held:
                names = dict.fromkeys(lost[place] for place in held.values() if place)
                return f"{' and '.join(names)}, and with it {', '.join(map(_title, held))}"
            if settled:  # the process died, and not its machine
                return None
        return None


def _title(actor: Actor) -> str:
    return f"{actor[0]} {actor[1]}"


@contextmanager
def watched_machines(
    groups: Mapping[str, Placed],
    log: "logging.Logger | logging.LoggerAdapter[Any]",
    advice: str,
    load_seconds: float = inf,
) -> Iterator[MachineWatch]:
    """Watch the machines that a run's actors are on.

    Args:
        groups, log, load_seconds: of `MachineWatch`.
        advice: how to go on without a machine, the end of a sentence.

    Raises:
        MachineLost: one is lost that held actors which are not started again; in place of the error that came of it.
        NotLoaded: an actor that was started again has not loaded in time, or its processes die as they begin; likewise.
    """
    watch = MachineWatch(groups, log, load_seconds)
    try:
        yield watch
    except (RayError, NotLoaded) as error:
        if watch.loads.error is not None:  # who waited knows that an actor was ended, and the watch why
            raise watch.loads.error from error
        if isinstance(error, NotLoaded):
            raise
        if isinstance(error, RayTaskError) and isinstance(error.cause, DoubleflowError):
            raise
        lost = watch.verdict()
        if lost is None:
            raise
        raise MachineLost(
            f"machine lost: {lost}, which cannot be started elsewhere during the run; {advice}"
        ) from error
    finally:
        watch.stop()
