# SPDX-License-Identifier: Apache-2.0
"""GPU slots: a run holds some of a pool by a lease of Prefect's, waits for them aloud, and gives up a dead one's.

What is done here is Prefect's `concurrency`, which tells nobody its lease's id. By that a run that goes on releases the
lease of its own killed process, which would else stay for a minute and a half; and it renews with more patience.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import psutil
from httpx import HTTPError, HTTPStatusError, codes
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.concurrency._events import emit_concurrency_acquisition_events, emit_concurrency_release_events
from prefect.events.filters import EventFilter
from prefect.exceptions import ObjectNotFound

from tasks.actors.ray_address import ClusterError
from tasks.actors.watchdog import marked
from tasks.config.trainer import RayConfig
from tasks.records.flow_page import say
from tasks.records.owner import Owner
from tasks.run.slot_lease import LEASE_SECONDS, SlotLease, kept
from tasks.system.files import put_in_place, remove
from tasks.system.processes import wait_until_ended

log = logging.getLogger(__name__)

RECORD = ".gpu_slots"
"""In a run's folder: which lease it has, and which process."""
EVENTS = 50
"""So many of a pool's last ones are looked at for who has its slots; Prefect gives no more at once."""
TAKEN, GIVEN_BACK = "prefect.concurrency-limit.acquired", "prefect.concurrency-limit.released"


class Held(NamedTuple):
    """Slots that a process has.

    Attributes:
        lease: its id at the Prefect server; others do not know it.
        owner: the process.
    """

    lease: UUID
    owner: Owner

    @classmethod
    def read(cls, file: Path) -> "Held | None":
        """From a run's record; None without one. Of one that cannot be read a warning tells."""
        if not os.path.lexists(file):
            return None
        try:
            found = json.loads(file.read_text())
            owner = Owner.parsed(found["owner"])
            if owner is None:
                raise ValueError(f"no process is {found['owner']!r:.200}")
            return cls(UUID(found["lease"]), owner)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            told = "%s does not say which GPU slots a killed process of the run left (%r): they stay until they expire"
            log.warning(told, file, error)
            return None

    def write(self, file: Path) -> None:
        """The whole record or none."""
        with put_in_place(file) as aside:
            aside.write_text(json.dumps({"lease": str(self.lease), "owner": str(self.owner)}))


@contextmanager
def gpu_slots(
    config: RayConfig, gpus: float, folder: Path | None = None, told: Callable[[str], None] = say
) -> Iterator[float]:
    """Hold a slot of `config.gpu_pool` for each GPU, so that two runs never share one; waits until they are free.

    The slots are a lease: those of a run that was killed are free again after a minute and a half, and for the same run
    as soon as the killed process's own have ended. Slots that others may have got end the run, as Prefect's
    `concurrency` has it; a server that is away does not.

    Args:
        folder: of a run whose lock this process has; it keeps there which lease is its own.
        told: is given each line about what is waited for.

    Returns:
        the seconds that it waited; 0 where nothing had to be waited for.

    Raises:
        ClusterError: the pool is unknown, or smaller than what the run needs.
    """
    record = None if folder is None else folder / RECORD
    waited = 0.0 if record is None else _release_of_dead(record, told)
    if config.gpu_pool is None or gpus == 0:
        yield waited
        return
    slots = math.ceil(gpus)
    with get_client(sync_client=True) as client:
        _require_room(client, config.gpu_pool, slots)
        lease, seconds = _acquire(client, config.gpu_pool, slots, told)
    events = emit_concurrency_acquisition_events(lease.limits, slots)

    def note(id_: UUID) -> None:
        if record is not None:
            Held(id_, Owner.this()).write(record)

    try:
        note(lease.id)
        with kept(lease, note):
            yield waited + seconds
    finally:
        _release(lease.id)
        emit_concurrency_release_events(lease.limits, slots, events)
        if record is not None:
            remove(record)


def _release(lease: UUID) -> None:
    """Free its slots. One that has expired, or that this server never knew, changes nothing."""
    with get_client(sync_client=True) as client:
        client.release_concurrency_slots_with_lease(lease)


def _require_room(client: SyncPrefectClient, pool: str, slots: int) -> None:
    """Raise ClusterError where the pool will never have so many."""
    limit = _read(client, pool).limit
    if slots > limit:
        raise ClusterError(f"the run needs {slots} GPUs but ray_init.gpu_pool {pool} has {limit} in all")


def _read(client: SyncPrefectClient, pool: str) -> GlobalConcurrencyLimitResponse:
    """The pool as it is now. Raises ClusterError where there is none."""
    try:
        return client.read_global_concurrency_limit_by_name(pool)
    except ObjectNotFound as error:
        raise ClusterError(
            f"ray_init.gpu_pool is {pool!r}, which Prefect does not know: make it with `prefect gcl create {pool} "
            "--limit <GPUs>`"
        ) from error


def _acquire(client: SyncPrefectClient, pool: str, slots: int, told: Callable[[str], None]) -> tuple[SlotLease, float]:
    """A lease of so many slots, and the seconds that it was waited for. The server says when to ask again."""
    begun = None
    while True:
        try:
            lease = SlotLease.acquired(client, pool, slots)
        except HTTPStatusError as error:
            if error.response.status_code != codes.LOCKED:
                _require_room(client, pool, slots)  # it may have become smaller meanwhile
                raise
            if begun is None:
                begun = time.perf_counter()
                told(_waits(client, pool, slots))
            time.sleep(float(error.response.headers["Retry-After"]))
            continue
        if lease is None:  # it was removed meanwhile
            _require_room(client, pool, slots)
            continue
        return lease, 0.0 if begun is None else time.perf_counter() - begun


def _waits(client: SyncPrefectClient, pool: str, slots: int) -> str:
    """That a run waits, for how many slots and, as far as Prefect's events tell, for whom."""
    found = _read(client, pool)
    try:
        holders = ", ".join(_holders(client, found))
    except HTTPError as error:  # a server need not keep any, and the run is not to end of it
        holders = f"whom Prefect does not tell ({error!r:.200})"
    by = f" by {holders}" if holders else ""
    return f"waits for GPU slots of {pool}: needs {slots}, and {found.active_slots} of {found.limit} are taken{by}"


def _holders(client: SyncPrefectClient, pool: GlobalConcurrencyLimitResponse) -> list[str]:
    """The names of the flow runs that have the pool's slots, the latest first; not those whose events Prefect has no
    more.

    Of the events of one name the latest counts: a killed flow run gives nothing back, but the one that goes on has its
    name, and does.
    """
    resource = {"id": [f"prefect.concurrency-limit.{pool.id}"]}
    wanted = EventFilter.model_validate({"event": {"name": [TAKEN, GIVEN_BACK]}, "resource": resource})
    latest: dict[str, tuple[UUID, int]] = {}
    for event in client.read_events(wanted, EVENTS).events:  # the latest come first
        run = next((related for related in event.related if related.role == "flow-run"), None)
        if run is not None and run.name is not None and run.name not in latest:
            slots = int(event.resource["slots-acquired"]) if event.event == TAKEN else 0
            latest[run.name] = run.prefect_object_id("prefect.flow-run"), slots
    asked = FlowRunFilter.model_validate({"id": {"any_": [run for run, _ in latest.values()]}})
    runs = client.read_flow_runs(flow_run_filter=asked)
    ended = {run.id for run in runs if run.state is not None and run.state.is_final()}
    left, names = pool.active_slots, []
    for name, (one, slots) in latest.items():
        if slots and one not in ended and left > 0:  # what is older than all that are taken was never given back
            names.append(name)
            left -= slots
    return names


def _release_of_dead(record: Path, told: Callable[[str], None]) -> float:
    """Release the slots that a dead process of this machine has left in the run's record, once nothing that it started
    is left, which may have memory of their GPUs; the seconds of that wait.

    Of another machine or container nobody here knows what is left: its slots stay until they expire.
    """
    held = Held.read(record)
    if held is None or held.owner.alive is not False:
        return 0.0
    begun = time.perf_counter()
    waits = _outlived(held.owner, told)
    _release(held.lease)
    remove(record)
    return time.perf_counter() - begun if waits else 0.0


def _outlived(owner: Owner, told: Callable[[str], None]) -> bool:
    """Wait until all has ended that the process had started, which its watchdog sees to; had any to end?

    For as long as its slots could stay in any case, then a warning tells what runs still.
    """
    mark, over = str(owner.process), time.monotonic() + LEASE_SECONDS
    left = first = [*marked(mark)]
    if first:
        told(f"waits until what the run's killed process {owner.process.pid} started has ended: {_pids(first)}")
    while left and time.monotonic() < over:
        wait_until_ended(left, over - time.monotonic())
        left = [*marked(mark)]  # one that was ending may have started another
    if left:
        log.warning(
            "of the run's killed process %d others are left, and may use its GPUs: %s", owner.process.pid, _pids(left)
        )
    return bool(first)


def _pids(processes: Iterable[psutil.Process]) -> str:
    """As the user may look for them."""
    return ", ".join(f"pid {pid}" for pid in sorted({process.pid for process in processes}))
