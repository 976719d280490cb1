# SPDX-License-Identifier: Apache-2.0
"""Whose an MLflow run is, and the end of runs whose process died without a word.

A process that is killed, or whose machine vanishes, leaves its MLflow run RUNNING. The run's tags say which process
wrote it last, and in which flow run: whoever comes by next closes it.
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prefect.context import FlowRunContext

from tasks.system.late_mlflow import MlflowClient, Run, mlflow
from tasks.system.processes import ProcessIdentity, boot_id

OWNER = "doubleflow.owner"
FLOW_RUN = "doubleflow.flow_run"
ENDED = "doubleflow.ended"
"""Tag of a run that somebody else closed: why."""
MACHINE_ID = Path("/etc/machine-id")
OF_THE_MACHINE = "pid:[4026531836]"
"""The namespace of process numbers that every Linux begins with, PROC_PID_INIT_INO: outside of containers."""
OF_AN_IMAGE = Path("/.dockerenv"), Path("/run/.containerenv")
"""Docker and Podman leave these, also in what a virtual machine is made of."""


class Owner(NamedTuple):
    """A process of some machine.

    Attributes:
        host: the machine's name.
        namespace: of process numbers; two containers of one machine may each have a process of the same number.
        process: which one.
        machine: mark of the machine that it keeps from boot to boot; None where there is none, or of older versions.
    """

    host: str
    namespace: str
    process: ProcessIdentity
    machine: str | None = None

    @classmethod
    def this(cls) -> "Owner":
        """This process."""
        return cls(socket.gethostname(), _namespace(), ProcessIdentity.of(os.getpid()), _machine())

    @classmethod
    def parsed(cls, text: str) -> "Owner | None":
        """From what `str` gave; None where it is something else."""
        try:
            host, namespace, process, *machine = json.loads(text)  # of older versions without the last
            return cls(host, namespace, ProcessIdentity.parsed(process), *machine)
        except (ValueError, TypeError, AttributeError):
            return None

    def __str__(self) -> str:
        """One line of JSON, for a tag."""
        return json.dumps([self.host, self.namespace, str(self.process), self.machine])

    @property
    def alive(self) -> bool | None:
        """Does it run? None where that cannot be said from here: it is, or may be, of another machine or container.

        Two machines may have one name, as pods of two namespaces have: one of another boot is dead only where the mark
        says that this machine had that boot.
        """
        if self.host != socket.gethostname():
            return None
        if self.process.boot != boot_id():
            return False if self.machine is not None and self.machine == _machine() else None
        return self.process.process() is not None if self.namespace == _namespace() else None


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _machine() -> str | None:
    """The machine's mark: a digest, as machine-id(5) wants its number kept from others.

    None where the file is missing, unreadable or not filled yet, and in a container: there it may be the image's, which
    containers of other machines have too.
    """
    if _namespace() != OF_THE_MACHINE or any(path.exists() for path in OF_AN_IMAGE):
        return None
    try:
        number = MACHINE_ID.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return (
        hashlib.sha256(f"{OWNER} {number}".encode()).hexdigest()[:32] if re.fullmatch("[0-9a-f]{32}", number) else None
    )


def owner_tags() -> dict[str, str]:
    """What a run of this process is marked with."""
    context = FlowRunContext.get()
    flow_run = {} if context is None or context.flow_run is None else {FLOW_RUN: str(context.flow_run.id)}
    return {OWNER: str(Owner.this())} | flow_run


def close_dead_runs(
    client: MlflowClient, experiments: Sequence[str] | None = None, crashed: str | None = None
) -> list[str]:
    """Set runs FAILED that MLflow calls RUNNING and whose process is dead; a tag of each says so.

    Args:
        client: MLflow.
        experiments: ids of those to look through; None looks through all.
        crashed: id of a flow run that Prefect has given up: its runs are closed too, unless their process is here and
            alive, which was only late with its heartbeats.

    Returns:
        Ids of the runs that were closed.
    """
    # All are found before the first is closed: a page begins after as many of those that still match.
    experiments = _active_experiments(client) if experiments is None else [*experiments]
    search = partial(client.search_runs, experiments, "attributes.status = 'RUNNING'")
    closed = []
    for run in _all_pages(search) if experiments else []:
        reason = _why_dead(run, crashed)
        if reason is not None:
            _close(client, run.info.run_id, reason)
            closed.append(run.info.run_id)
    return closed


def without_a_word(run: Run) -> str | None:
    """How a run has ended of which MLflow says that it is running; None of one that may be alive, or has ended."""
    return _why_dead(run, None) if run.info.status == "RUNNING" else None


def _active_experiments(client: MlflowClient) -> list[str]:
    """Ids of the experiments that are not deleted."""
    search = partial(client.search_experiments, view_type=mlflow.entities.ViewType.ACTIVE_ONLY)
    return [experiment.experiment_id for experiment in _all_pages(search)]


def _all_pages(search: Callable[..., Any]) -> list[Any]:
    """All that MLflow finds, of every page.

    Args:
        search: one of its client's searches, which takes a `page_token`.
    """
    found, token = [], None
    while True:
        page = search(page_token=token)
        found += page
        if not (token := page.token):
            return found


def _why_dead(run: Run, crashed: str | None) -> str | None:
    """None of a run that may be alive."""
    owner = Owner.parsed(run.data.tags.get(OWNER, ""))
    alive = None if owner is None else owner.alive
    if owner is not None and alive is False:
        return f"its process (pid {owner.process.pid} on {owner.host}) ended without a word"
    if alive is None and crashed is not None and run.data.tags.get(FLOW_RUN) == crashed:
        return f"its flow run {crashed} crashed, and its process said no more"
    return None


def _close(client: MlflowClient, run_id: str, reason: str) -> None:
    client.log_batch(run_id, tags=[mlflow.entities.RunTag(ENDED, f"{reason}; the same command continues the run")])
    client.set_terminated(run_id, "FAILED")
