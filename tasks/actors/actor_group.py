# SPDX-License-Identifier: Apache-2.0
"""Long-lived Ray actors of one class, which hold the models: started together, called in turn or all at once."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from tasks.actors.loading import get_loaded
from tasks.actors.machines import Whereabouts
from tasks.actors.memory import ActorMemory, memory_of
from tasks.actors.rank_places import RankPlaces
from tasks.actors.waiting import get, unfinished
from tasks.actors.worker_forks import started_by_python


class ActorGroup:
    """Actors of one class, started together and called in turn or all at once.

    CPU actors ask for no cores, unless told to: the stages of an iteration take turns on the same ones.

    Args:
        actor_class: a plain class; it becomes a Ray actor here.
        count: how many.
        num_gpus: GPUs, or a share of one, that each takes.
        arguments: the constructor's, the same for all.
        places: where actor i is, of these; without them Ray chooses.
        concurrency_groups: threads of an actor by the name that a call gives as its `concurrency_group`: so many such
            calls run at a time. Of the others, as of all without any groups, one after the other.
        options: Ray's own: num_cpus, max_restarts and so on.

    Attributes:
        restarts: does Ray start an actor again that died, or whose machine is lost?
        whereabouts: of the actors.
        begun: what was asked for and nobody waits for, see `begin`.
    """

    def __init__(
        self,
        actor_class: type,
        count: int,
        num_gpus: float,
        arguments: Sequence[Any] = (),
        *,
        places: RankPlaces | None = None,
        concurrency_groups: Mapping[str, int] | None = None,
        **options: Any,
    ):
        decorate: Any = ray.remote  # whose types know of no groups
        remote = decorate(concurrency_groups=dict(concurrency_groups or {}))(actor_class)
        given = {"num_cpus": 0, "num_gpus": num_gpus} | started_by_python(options.get("num_cpus", 0)) | options
        where = [{} if places is None else {"scheduling_strategy": places.place(i)} for i in range(count)]
        # A handle has its methods of the class, at run time: a type checker knows none of them.
        self.actors: list[Any] = [remote.options(**given | place).remote(*arguments) for place in where]
        self.restarts = bool(given.get("max_restarts", 0))
        self.whereabouts = Whereabouts(self.actors)
        self.begun: tuple[ray.ObjectRef, ...] = ()

    def __len__(self) -> int:
        return len(self.actors)

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` on every actor; the results in the actors' order. An actor's error is raised here."""
        return self.get([getattr(actor, method).remote(*arguments) for actor in self.actors])

    def wait_loaded(self, name: str, seconds: float, method: str, *arguments: Any) -> list[Any]:
        """As `call_all`, of actors that may still load; see `get_loaded` for the name, the seconds and the error."""
        answers = [getattr(actor, method).remote(*arguments) for actor in self.actors]
        return get_loaded([f"{name} {number}" for number in range(len(self))], self.actors, answers, seconds)

    def begin(self, answers: Sequence[ray.ObjectRef]) -> None:
        """Go on without these answers, which are small; an error of theirs is raised by what is asked for later.

        Actors that compute together wait for one that has failed, and answer nothing until then.
        """
        self.begun = (*unfinished(self.begun), *answers)

    def get(self, answers: Sequence[ray.ObjectRef], beside: Sequence[ray.ObjectRef] = ()) -> list[Any]:
        """What the actors answer; the first error of that, of what was begun before, or of what others do `beside`, is
        raised here."""
        found: list[Any] = get(answers, beside=(*self.begun, *beside))
        return found

    def ask_memory(self) -> Callable[[], list[ActorMemory]]:
        """A function, for any thread, that waits for what every actor says of its memory once it has done what was
        asked of it before; the first error of that, or of what was begun, is raised there."""
        patient = {"max_task_retries": -1} if self.restarts else {}  # its machine may just have been lost
        answers = [actor.__ray_call__.options(**patient).remote(memory_of) for actor in self.actors]
        self.whereabouts.refresh()
        return partial(get, answers, beside=self.begun)
