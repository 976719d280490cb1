# SPDX-License-Identifier: Apache-2.0
"""A lease of slots at a Prefect server that is renewed for as long as it is needed, also through the server's outages.

Prefect's own `maintain_concurrency_lease` asks once in three quarters of a lease, tries for some three seconds, and
then ends the flow run, while the slots stay reserved for a quarter more: a server that started just then ended it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from uuid import UUID

from httpx import HTTPError, HTTPStatusError, codes
from prefect._internal.concurrency.cancellation import WatcherThreadCancelScope
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import ConcurrencyLimitWithLeaseResponse

log = logging.getLogger(__name__)

LEASE_SECONDS = 90.0
"""After which the slots of a run that was killed are free; they are renewed while it lives. Prefect takes no less than
60."""
RENEWED_EVERY, TRIED_EVERY = 20.0, 1.0
"""Seconds between two renewals, and between two tries where a server does not answer."""
LAST_ANSWER_S = 30.0
"""For the answer to a request that is under way when the slots are given back."""


class SlotsLost(Exception):
    """Others may have the slots."""


class SlotLease:
    """Slots of one pool, under the lease that the server knows at present.

    Attributes:
        id: the lease's, which changes where it had expired and its slots were still to be had.
        limits: the pool, as the server answered.
    """

    def __init__(self, acquired: ConcurrencyLimitWithLeaseResponse, slots: int):
        self.id, self.limits, self.slots = acquired.lease_id, acquired.limits, slots

    @classmethod
    def acquired(cls, client: SyncPrefectClient, pool: str, slots: int) -> "SlotLease | None":
        """So many slots of a pool; None where the server knows no such pool any more.

        Raises:
            HTTPStatusError: LOCKED while they are not free, with a `Retry-After`.
        """
        response = client.increment_concurrency_slots_with_lease([pool], slots, "concurrency", LEASE_SECONDS)
        acquired = ConcurrencyLimitWithLeaseResponse.model_validate(response.json())
        return cls(acquired, slots) if acquired.limits else None

    def renew(self, client: SyncPrefectClient) -> None:
        """Once. An expired lease is replaced by another of as many slots, if nobody has taken them.

        Raises:
            SlotsLost: somebody has, or the pool is gone.
            HTTPError: the server gave no answer that says so.
        """
        try:
            client.renew_concurrency_lease(self.id, LEASE_SECONDS)
        except HTTPStatusError as error:
            if error.response.status_code != codes.GONE:
                raise
            self._replace(client)

    def _replace(self, client: SyncPrefectClient) -> None:
        pool = self.limits[0].name
        try:
            found = self.acquired(client, pool, self.slots)
        except HTTPStatusError as error:
            if error.response.status_code != codes.LOCKED:
                raise
            raise SlotsLost(f"their lease expired, and others have slots of {pool} now") from error
        if found is None:
            raise SlotsLost(f"their lease expired, and there is no pool {pool} any more")
        log.warning("the lease of the run's GPU slots had expired; it has another one")
        self.id = found.id


@contextmanager
def kept(lease: SlotLease, changed: Callable[[UUID], None]) -> Iterator[None]:
    """Renew a lease until the block ends. Where others have its slots Prefect's CancelledError ends the block.

    A server that does not answer gives slots to nobody, so nothing ends while it is away. Where it is away from here
    alone others may have got them meanwhile, which shows as soon as it answers.

    Args:
        changed: is given the lease's id where it is another.
    """
    over = threading.Event()
    with WatcherThreadCancelScope() as scope:

        def renew() -> None:
            try:
                _renew_until(over, lease, changed)
            except Exception as error:
                if not over.is_set():
                    log.error("the run's GPU slots are not reserved any more, so it ends: %s", error)
                    scope.cancel()

        thread = threading.Thread(target=copy_context().run, args=(renew,), daemon=True, name=f"renews {lease.id}")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(LAST_ANSWER_S)


def _renew_until(over: threading.Event, lease: SlotLease, changed: Callable[[UUID], None]) -> None:
    """Renew whenever it is time; told once of an outage, and of its end."""
    away_since: float | None = None
    with get_client(sync_client=True) as client:
        while not over.wait(RENEWED_EVERY if away_since is None else TRIED_EVERY):
            before = lease.id
            try:
                lease.renew(client)
            except HTTPError as error:
                if away_since is None:
                    away_since = time.monotonic()
                    log.warning("the lease of the run's GPU slots is not renewed, tried on: %r", error)
                continue
            if lease.id != before:
                changed(lease.id)
            if away_since is not None:
                log.warning("the lease of the run's GPU slots is renewed, after %.0f s", time.monotonic() - away_since)
                away_since = None
