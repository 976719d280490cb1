# SPDX-License-Identifier: Apache-2.0
"""Machines of the cluster that are lost while a run has actors on them: what is said, and what ends the run.

Ray starts an actor elsewhere once it knows that its machine is gone. That takes it up to a minute, in which calls fail
because the actor does not answer. Whoever calls has to tell that from a worker that died.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from models.errors import DoubleflowError

if TYPE_CHECKING:
    from tasks.actors.cluster import ActorGroup

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

    def moved(self, number: int) -> None:
        """Its machine is lost: it has to answer from another one."""
        self._asked[number] = self._ask(number)

    def lost(self, number: int, machine: str | None) -> str | None:
        """Name of the machine that an actor was on, if that is lost; waits until Ray knows, or the actor answers.

        Args:
            machine: where the actor was when the call that failed was made; None where nobody knew.
        """
        asked = self._ask(number)
        before = machine or self.last(number) or ""
        while True:
            answered = ray.wait([asked], timeout=POLL_S)[0]  # it is there, or is dead for good
            name = lost_machines().get(before)
            if name is not None and self.machine(number) == before:
                self.moved(number)
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


class MachineWatch:
    """Says which machines are lost, what was on them, and when it is back; as a thread, for the driver only waits then.

    Args:
        groups: of the run, by name.
        log: where it is said.
    """

    def __init__(self, groups: "Mapping[str, ActorGroup]", log: "logging.Logger | logging.LoggerAdapter[Any]"):
        self.groups, self.log = groups, log
        self._lost: set[str] = set(lost_machines())
        self._counted = self._metered = 0
        self._away: dict[Actor, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Before the driver leaves the cluster."""
        self._ended.set()
        self._thread.join(5 * POLL_S)

    def metrics(self) -> dict[str, float]:
        """machines/lost since the last time, of machines that the run was on; nothing where none is."""
        new, self._metered = self._counted - self._metered, self._counted
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
        here = {actor: self.groups[actor[0]].whereabouts.last(actor[1]) for actor in self._actors()}
        lost = lost_machines()
        for machine in lost.keys() - self._lost:
            self._lost.add(machine)
            held = [actor for actor, place in here.items() if place == machine]
            if held:
                self._tell(lost[machine], held)
        for actor in list(self._away):
            place = here[actor]
            if place is not None and place not in lost:
                del self._away[actor]
                self.log.warning("%s is back, on another machine", _title(actor))
            elif time.monotonic() - self._away[actor] > REMINDER_S:
                self._away[actor] = time.monotonic()
                self.log.warning("%s is not back yet: it waits for room on a machine of the cluster", _title(actor))

    def _tell(self, machine: str, held: Sequence[Actor]) -> None:
        self._counted += 1
        away = [actor for actor in held if self.groups[actor[0]].restarts]
        for actor in away:
            self._away[actor] = time.monotonic()
            self.groups[actor[0]].whereabouts.moved(actor[1])
        told = f"machine lost: {machine}, and with it {', '.join(map(_title, held))}"
        again = f"; {', '.join(map(_title, away))} will be started elsewhere, to do again what was not finished"
        self.log.warning("%s%s", told, again if away else "")

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
    groups: "Mapping[str, ActorGroup]", log: "logging.Logger | logging.LoggerAdapter[Any]", advice: str
) -> Iterator[MachineWatch]:
    """Watch the machines that a run's actors are on.

    Args:
        groups, log: of `MachineWatch`.
        advice: how to go on without a machine, the end of a sentence.

    Raises:
        MachineLost: one is lost that held actors which are not started again; in place of the error that came of it.
    """
    watch = MachineWatch(groups, log)
    try:
        yield watch
    except RayError as error:
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
