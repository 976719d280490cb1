# SPDX-License-Identifier: Apache-2.0
"""MLflow's client of a server that may be away, or of a database that another program may hold: what is asked of it
waits, says so, and gives up after a set time. And that of a database, which a signal must not leave locked."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import requests
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from models.errors import full_disk, no_room_for
from tasks.records.tracking_address import TrackingAway, is_server
from tasks.system.late_mlflow import MlflowClient, ModelVersion, mlflow
from tasks.system.signals import held_back

T = TypeVar("T")
ONE_TRY = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
"""MLflow's settings in the environment: its own retries take four minutes, and are silent."""
NO_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": 0}
LOCKED = "database is locked"
"""SQLite's word, after the 20 seconds that MLflow has it wait for whoever holds the file."""
FULL = "database or disk is full"
"""SQLite's word, too."""
LONGEST_PAUSE_S = 30.0


class AskedClient:
    """MLflow's client, each of whose requests is made by `asked`.

    Args:
        client: MLflow's own.
    """

    def __init__(self, client: MlflowClient):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        """The client's methods, each through `asked`."""
        found = getattr(self._client, name)
        if not callable(found):
            return found

        @wraps(found)
        def through(*arguments: Any, **named: Any) -> Any:
            return self.asked(lambda: found(*arguments, **named))

        return through

    def asked(self, request: Callable[[], T]) -> T:
        """The request's answer."""
        raise NotImplementedError


class LocalClient(AskedClient):
    """MLflow's client of a database or folder that this process opens itself; a signal waits for the end of a request.

    A signal within a transaction leaves it open in the frames that the signal's exception holds, and the database
    locked: the run's end would not be written.
    """

    def __init__(self, client: MlflowClient):
        super().__init__(client)
        logging.getLogger("mlflow.store.db.utils").addFilter(_has_to_be_said)

    def asked(self, request: Callable[[], T]) -> T:
        """The request's answer, whole.

        Raises:
            OSError: a disk is full, which the error names: MLflow's own of the database, or the system's of a file that
                is copied, do not.
        """
        try:
            with held_back():
                return request()
        except Exception as error:
            if FULL in str(error):
                raise no_room_for(self._client.tracking_uri) from error
            full = full_disk(error)
            if full is None or full.filename is not None:
                raise
            raise OSError(full.errno, full.strerror, f"artifacts of {self._client.tracking_uri}") from error


class PatientClient(AskedClient):
    """MLflow's client; a request that gets no answer is made again, for a while.

    Args:
        client: MLflow's own, or a `LocalClient`.
        uri: the server's or the database's.
        seconds: for how long an outage is waited for, `tracking.max_outage_s`.

    Attributes:
        meanwhile: a context that a wait is spent in, of the thread that made this client. It ends normally before an
            error that is an answer is raised; TrackingAway is raised through it.
        waits: does another thread wait for the server now?
    """

    def __init__(self, client: MlflowClient, uri: str, seconds: float):
        super().__init__(client)
        self._uri, self._seconds = uri, seconds
        self._thread, self.waits = threading.get_ident(), False
        self._begun: dict[int, float] = {}
        """Thread -> when the request that it waits for was first made. The first thread speaks for all of them."""
        for name, value in ONE_TRY.items():
            os.environ.setdefault(name, value)
        self.meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext

    def asked(self, request: Callable[[], T]) -> T:
        """The request's answer.

        Raises:
            TrackingAway: there was no answer for `seconds`.
        """
        begun = time.monotonic()
        try:
            return request()
        except Exception as error:
            if why_away(error) is None:
                raise
            first = error
        if threading.get_ident() == self._thread:
            with self.meanwhile():
                try:
                    return self._again(request, begun, first)
                except TrackingAway:
                    raise
                except Exception as error:
                    refusal = error
            raise refusal  # whoever asked may go on after it, with what was put to sleep meanwhile
        self.waits = True
        try:
            return self._again(request, begun, first)
        finally:
            self.waits = False

    def once(self, find: Callable[[MlflowClient], Sequence[T]], make: Callable[[MlflowClient], T]) -> T:
        """What is there already, or else is made: where only the answer to that was lost, it is found, not made twice.

        Args:
            find: of the client that it is given, the first is taken.
            make: of the same client; MLflow's own retries, which do not look before, have no part in it.

        Raises:
            TrackingAway: as `asked`.
        """

        def found_or_made() -> T:
            there = find(self._client)
            if there:
                return there[0]
            with few_retries(NO_RETRIES):
                return make(self._client)

        return self.asked(found_or_made)

    def download_artifacts(self, run_id: str, path: str, dst_path: str | None = None) -> str:
        """As MLflow's, which says of each download that fails that there is no such artifact: where there is one, it is
        asked for again, and where MLflow does not say whether there is, that is waited for.

        Raises:
            MlflowException: the run has no such artifact.
            TrackingAway: as `asked`.
        """

        folder = Path(path).parent.as_posix()

        def is_there() -> bool:
            files = self._client.list_artifacts(run_id, None if folder == "." else folder)
            return path in [file.path for file in files]

        return self._downloaded(partial(self._client.download_artifacts, run_id, path, dst_path), is_there)

    def download_version(self, version: ModelVersion, dst_path: str | None = None) -> str:
        """Where a registered version's files lie, or were copied to, below `dst_path`. As `download_artifacts`.

        Raises:
            MlflowException: there is no such version, or it has no files that can be had.
            TrackingAway: as `asked`.
        """
        source, uri = version.source, self._client.tracking_uri
        fetch = partial(mlflow.artifacts.download_artifacts, source, dst_path=dst_path, tracking_uri=uri)
        return self._downloaded(fetch, lambda: bool(self._client.get_model_version(version.name, version.version)))

    def _downloaded(self, fetch: Callable[[], str], is_there: Callable[[], bool]) -> str:
        """What `fetch` returns, called again where it says that there is nothing and MLflow that there is."""

        def downloaded() -> str:
            try:
                return str(fetch())
            except mlflow.exceptions.MlflowException:
                if not is_there():
                    raise
            return str(fetch())

        return self.asked(downloaded)

    def _again(self, request: Callable[[], T], begun: float, error: Exception) -> T:
        thread = threading.get_ident()
        self._begun[thread] = begun
        try:
            first = min([*self._begun.values()])
            return self._answered(request, first, error, lambda: thread == next(iter(self._begun)))
        finally:
            del self._begun[thread]

    def _answered(self, request: Callable[[], T], begun: float, error: Exception, speaks: Callable[[], bool]) -> T:
        """The answer to a request made again and again; `begun` is the outage, whoever met it first."""
        pause, log, spoke = 1.0, _log(), False
        while (left := self._seconds - (time.monotonic() - begun)) > 0:
            if speaks():
                spoke = True
                log.warning(
                    "MLflow at %s does not answer (%s): asked again in %.0f s, for %.0f s more "
                    "(tracking.max_outage_s %g)",
                    *(self._uri, why_away(error), min(pause, left), left, self._seconds),
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)
            try:
                answer = request()
            except Exception as again:
                if why_away(again) is None:
                    raise
                error = again
            else:
                if spoke:
                    log.warning("MLflow at %s answers again, after %.0f s", self._uri, time.monotonic() - begun)
                return answer
        mend = "start it" if is_server(self._uri) else "end what holds it, or wait for that"
        raise TrackingAway(
            f"MLflow at {self._uri} has not answered for {time.monotonic() - begun:.0f} s, longer than "
            f"tracking.max_outage_s {self._seconds:g} ({why_away(error)}): {mend}; the same command then continues "
            "the run"
        ) from error


@contextmanager
def few_retries(limits: Mapping[str, int]) -> Iterator[None]:
    """MLflow's requests within give up after seconds, where its own settings take minutes; a shorter one stays."""
    before = {name: os.environ.get(name) for name in limits}
    for name, most in limits.items():
        given = before[name]
        os.environ[name] = str(most if given is None or given == ONE_TRY[name] else min(most, int(given)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def why_away(error: BaseException) -> str | None:
    """Why there was no answer, in a few words; None for an error that is one."""
    for found in (error, error.__cause__, error.__context__):
        if isinstance(found, requests.exceptions.Timeout):
            return "no answer in time"
        if isinstance(found, requests.exceptions.RetryError):  # of MLflow's client, for 429, 503 and their like
            status = re.search(r"too many (\d+) error", str(found))
            return f"it says {status[1]}" if status else "it answers with errors"
        if isinstance(found, requests.exceptions.ConnectionError | requests.exceptions.ChunkedEncodingError):
            return "no answer in time" if "timed out" in str(found) else "no connection"  # after Retry's own count
        if type(found).__name__ == "OperationalError" and LOCKED in str(found):  # of SQLAlchemy, imported with MLflow
            return "another program holds its database"
    return None


def _has_to_be_said(record: logging.LogRecord) -> bool:
    """Not what MLflow logs with its frames at each try of a database that is locked or has no room: who waits says it
    in a line, and who does not raises it."""
    return not any(word in record.getMessage() for word in (LOCKED, FULL))


def _log() -> Any:
    """The flow run's, whose page shows it; outside of one, this module's."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger(__name__)
