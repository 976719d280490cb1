# SPDX-License-Identifier: Apache-2.0
"""What a Ray cluster of this machine keeps in files, for this user alone: its working folder and its token.

Ray opens its folders to everybody (mode 0777), and its token has the mode that the umask leaves. Who can swap a socket
there, or read the token, runs commands in the cluster.
"""

import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from models.errors import DoubleflowError
from tasks.system.signals import held_back

log = logging.getLogger(__name__)

ENGINES_SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable with vLLM's folder of sockets, which is else the system's temporary one."""
LONGEST = 40
"""Characters of a folder's path with which the names of Ray's sockets are at most the 107 that Linux takes."""


class RayFilesError(DoubleflowError, RuntimeError):
    """Ray's files have no place, or others could read them."""


@contextmanager
def working_folder() -> Iterator[Path]:
    """A folder for Ray within one that only this user enters, in RAY_TMPDIR or the system's temporary folder.

    Both are removed afterwards. After an error the logs of Ray's processes stay, and the error says where.

    Raises:
        RayFilesError: its path would be too long, or nothing can be written there.
    """
    outer = _private_folder()
    inner = outer / "r"
    try:
        if len(str(inner)) > LONGEST:
            raise RayFilesError(
                f"the names of Ray's sockets would be too long in {outer.parent}: set RAY_TMPDIR to a folder with a "
                f"path of at most {LONGEST - len(str(inner)) + len(str(outer.parent))} characters"
            )
        yield inner
    except Exception as error:
        for logs in sorted(inner.glob("session_[0-9]*/logs"))[-1:]:  # there are two where Ray was started again
            logs.rename(outer / "logs")
            error.add_note(f"the logs of Ray's processes are in {outer / 'logs'}")
        raise
    finally:
        with held_back():
            shutil.rmtree(inner, ignore_errors=True)
            with suppress(OSError):  # it stays where it has logs
                outer.rmdir()


def keep_engines_sockets() -> None:
    """An engine of vLLM's below this process, an actor's, has its sockets in Ray's folder, which goes with the cluster,
    unless the environment says where: it leaves them behind."""
    if ray.is_initialized():
        node: Any = ray._private.worker._global_node
        os.environ.setdefault(ENGINES_SOCKETS, node.get_temp_dir_path())


def _private_folder() -> Path:
    """A new folder, mode 0700. Raises RayFilesError where none can be made."""
    place = os.environ.get("RAY_TMPDIR")
    try:
        return Path(tempfile.mkdtemp(prefix="ray-", dir=place)).absolute()
    except OSError as error:
        where = "the system's temporary folder" if place is None else f"RAY_TMPDIR {place}"
        raise RayFilesError(
            f"Ray's files cannot be written into {where} ({error.strerror}): set RAY_TMPDIR to a folder of your own"
        ) from error


def keep_token_private(makes_one: bool) -> None:
    """See to it that nobody else reads the token that Ray takes, where it takes one from a file.

    Args:
        makes_one: write a new one where there is none, before Ray does.

    Raises:
        RayFilesError: it is another user's file and can be read by others, or cannot be written.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        if makes_one and not path.exists():
            _write_token(path)
        if not path.exists() or not stat.S_IMODE(path.stat().st_mode) & 0o077:
            return
        path.chmod(0o600)
    except OSError as error:
        raise RayFilesError(
            f"{path}, with which one may run commands in Ray's cluster, is not this user's alone and cannot be made so "
            f"({error.strerror}): see to its mode, 600, or set RAY_AUTH_TOKEN"
        ) from error
    log.warning(
        "others could read %s, with which one may run commands in Ray's clusters: remove it for a new one", path
    )


def _write_token(path: Path) -> None:
    """Whole from the first moment, and never in the place of one that another process has just made."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as aside:  # mode 0600
        aside.write(secrets.token_hex(32))
        aside.flush()
        with suppress(FileExistsError):
            os.link(aside.name, path)
