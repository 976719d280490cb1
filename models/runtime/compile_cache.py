# SPDX-License-Identifier: Apache-2.0
"""Where torch.compile keeps what it made, for the other processes of a run and for later runs.

Inductor's own files: its keys hold the code, torch's version, its options and the device, and Triton's files lie below.
They are pickles and libraries that are loaded as they are found, so nobody else may write there; torch's own place is a
folder of /tmp that whoever comes first can make.
"""

import os
import stat
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_compile_cache(folder: str | None) -> Path:
    """Have this process, and those that it starts, keep compiled code in a folder that is this user's alone.

    Call it before anything is compiled.

    Args:
        folder: None is where TORCHINDUCTOR_CACHE_DIR says, or doubleflow/compiled in the user's cache.

    Raises:
        OSError: see `made_cache_folder`.
    """
    place = made_cache_folder(folder)
    os.environ[VARIABLE] = str(place)
    return place


def made_cache_folder(folder: str | None) -> Path:
    """The folder of `use_compile_cache`, which is made where it is not there.

    Raises:
        PermissionError: somebody else owns it, or could have written what is in it.
        OSError: it cannot be made.
    """
    place = Path(folder or os.environ.get(VARIABLE) or _default()).expanduser().absolute()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.stat().st_uid != os.geteuid():
        raise PermissionError(
            f"{place} belongs to the user with the number {place.stat().st_uid}, who could put code there that this "
            "run loads: give trainer.compile_cache a folder of your own"
        )
    mode = stat.S_IMODE(place.stat().st_mode)
    if mode & 0o022 and any(place.iterdir()):
        raise PermissionError(
            f"{place} has files and could be written by other users (mode {mode:o}), who may have put code there that "
            "this run would load: remove it, or give trainer.compile_cache a folder of your own"
        )
    if mode != 0o700:
        place.chmod(0o700)
    return place


def _default() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "doubleflow" / "compiled"
