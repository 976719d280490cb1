# SPDX-License-Identifier: Apache-2.0
"""Who may talk to the servers on this machine: whoever knows a secret that is made at their start."""

import os
import secrets
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread

from models.errors import DoubleflowError
from tasks.system.credentials import without_password
from tasks.system.kept_server import OF_A_TERMINAL, keep_temporary_server

USER = "doubleflow"
NOWHERE = "http://127.0.0.1"
"""An origin that no page has: the temporary server has no pages."""
QUIET = {"PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false", "PREFECT_LOGGING_SERVER_LEVEL": "ERROR"}
"""Of the temporary server: it makes no list of block types, and speaks in the run's terminal only of its errors."""
LOGS_FOR_WATCHERS = {
    "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
    "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
}
"""Without them `prefect deployment run --watch` shows that tasks begin and end, and no line of a run's log."""
KEPT_LEASES = {"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem"}
"""Leases of slots stay when the server is started again, which by default forgets them: a run that has some could not
renew its own, which ends it, and nothing would ever give them back."""
DVC_SITE_CACHE = Path(".doubleflow/dvc")
STARTUP_SECONDS = 300
"""Within which the temporary server must answer. Its first start makes a database, while the run's imports go on: with
Prefect's own 20 s it fails on a machine that is busy."""

PORTS_TRIED = 5
UNKNOWN = 401
"""What a server answers to another one's secret."""

TEMPORARY_SERVER = "DOUBLEFLOW_TEMPORARY_SERVER"
"""Variable of a command whose Prefect server is one that it starts for itself, and of all that it starts."""


class AccessError(DoubleflowError, RuntimeError):
    """A folder or file that should be this user's alone is not."""


def new_access() -> dict[str, str]:
    """The variables by which Prefect's and MLflow's clients are let in, with new secrets."""
    return {
        "PREFECT_API_AUTH_STRING": f"{USER}:{secrets.token_urlsafe(32)}",
        "MLFLOW_TRACKING_USERNAME": USER,
        "MLFLOW_TRACKING_PASSWORD": secrets.token_urlsafe(32),
    }


def server_settings(access: Mapping[str, str], prefect_port: int | None = None) -> dict[str, str]:
    """The variables by which the servers themselves want these secrets, and offer no more than is used.

    Args:
        access: of `new_access`.
        prefect_port: of Prefect's pages; None where it has none.
    """
    hosts = ("127.0.0.1", "localhost")
    origins = NOWHERE if prefect_port is None else ",".join(f"http://{host}:{prefect_port}" for host in hosts)
    return {
        "PREFECT_SERVER_API_AUTH_STRING": access["PREFECT_API_AUTH_STRING"],
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origins,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **LOGS_FOR_WATCHERS,
        **KEPT_LEASES,
    } | (QUIET if prefect_port is None else {})


def guard_temporary_server() -> None:
    """Call it before the first flow: the server that Prefect starts for a run without one then wants a secret, too,
    and has `STARTUP_SECONDS` for its start, where the user has set no other time.

    With an address in the environment or in Prefect's profile nothing changes: that server has its own rules.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None:
        return
    settings.home.mkdir(parents=True, exist_ok=True)  # without it the server's database cannot be opened
    access = new_access()
    wanted = server_settings(access) | {"PREFECT_API_AUTH_STRING": access["PREFECT_API_AUTH_STRING"]}
    if "startup_timeout_seconds" not in settings.server.ephemeral.model_fields_set:
        wanted["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = str(STARTUP_SECONDS)
    os.environ |= {name: value for name, value in wanted.items() if name.startswith("PREFECT")}
    os.environ[TEMPORARY_SERVER] = "1"
    refresh_global_settings_context()


def start_temporary_server(meanwhile: Callable[[], None]) -> None:
    """Have Prefect start it now, if it is to start one, where neither Ctrl-C nor the end of the terminal reaches it,
    and again where it ends before this process: ending the run takes a server.

    A terminal sends these signals to all of a command's processes, but to none that was started with them blocked.

    Args:
        meanwhile: what else is to be done; it is done while the server's process starts, and not where there is none.

    Raises:
        AccessError: it does not answer in time, or the one that the settings name does not.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None:
        _require_answer(settings.api.url)
        return
    failed: list[Exception] = []
    thread = Thread(target=_reach_server, args=(failed,), daemon=True)  # this one goes on to hear the signal
    thread.start()
    meanwhile()
    thread.join()
    if failed:
        raise AccessError(
            f"Prefect's temporary server does not answer ({failed[0]}): set "
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS to more than "
            f"{settings.server.ephemeral.startup_timeout_seconds}, or PREFECT_API_URL to a server that is up"
        ) from failed[0]
    keep_temporary_server()


def _require_answer(url: str) -> None:
    """Ask the server for its version: Prefect's own error, at the flow's start, comes with frames.

    Raises:
        AccessError: it does not answer, or not to this process.
    """
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            client.api_version()
    except Exception as error:  # of httpx, or of what reads the answer of a server that is not Prefect's
        status = getattr(getattr(error, "response", None), "status_code", None)
        why, advice = f"does not answer ({error})", "start it, as `make up` does, or correct PREFECT_API_URL"
        if status is not None:
            why = f"answers {status}"
            advice = "correct PREFECT_API_URL, or its secret, PREFECT_API_AUTH_STRING or PREFECT_API_KEY"
        raise AccessError(
            f"Prefect's server at {without_password(url)} {why}: {advice} (`. .services/environment` sets both for "
            "that of `make up`; the address ends in /api), or unset it, and the run starts a server of its own"
        ) from error


def shared_server() -> dict[str, str]:
    """The variable that leads a command which this flow starts to its server, also to one of this command alone."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return {"PREFECT_API_URL": str(client.api_url).rstrip("/")}


def _reach_server(failed: list[Exception]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_TERMINAL)
    try:
        for left in reversed(range(PORTS_TRIED)):
            if _is_reached(left):
                return
    except Exception as error:
        failed.append(error)


def _is_reached(others: int) -> bool:
    """Does the server that Prefect starts answer to this process's secret?

    Prefect draws its port seconds before the server listens there. Where another command's has done so meanwhile, that
    one answers, and to its own secret: then Prefect forgets it, and False is returned.

    Raises:
        PrefectHTTPStatusError: it answers an error; also that of such a server, where no `others` are to be tried.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.server.api.server import SubprocessASGIServer

    with get_client(sync_client=True) as client:
        try:
            client.api_version()
        except PrefectHTTPStatusError as error:
            if error.response.status_code != UNKNOWN or not others:
                raise
        else:
            return True
    SubprocessASGIServer().stop()
    return False


def private_folder(folder: Path) -> Path:
    """The folder, which is made, and from now on its owner's alone (mode 0700).

    Raises:
        AccessError: it is a link or somebody else's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
        raise AccessError(f"{folder} is a link or another user's: remove it, a folder of your own is made in its place")
    folder.chmod(0o700)
    return folder


def write_private(file: Path, text: str) -> None:
    """A new file that only its owner can read (mode 0600), from its first byte on."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)


def exports(variables: Mapping[str, str]) -> str:
    """Lines for a shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def exported(file: Path) -> dict[str, str]:
    """The variables of a file that `exports` wrote."""
    words = (shlex.split(line)[1] for line in file.read_text().splitlines())
    return dict(word.split("=", 1) for word in words)


def dvc_environment(root: Path) -> dict[str, str]:
    """The variable that keeps DVC's working folder in a private folder of `root`, which is made.

    DVC makes it in the system's temporary folder, writable for everybody, and unpickles what it finds there.
    """
    folder = root / DVC_SITE_CACHE.parent
    if folder.is_dir() and folder.stat().st_mode & 0o022:  # DVC made it: what others could have written goes
        shutil.rmtree(folder)
    private_folder(folder)
    return {"DVC_SITE_CACHE_DIR": str((root / DVC_SITE_CACHE).resolve())}
