# SPDX-License-Identifier: Apache-2.0
"""Whether a folder's content can only be this user's own."""

import grp
import os
import pwd
import stat
from pathlib import Path

from models.errors import DoubleflowError


class OwnershipError(DoubleflowError, RuntimeError):
    """Somebody else could have written what is about to be run or unpickled."""


def require_own(folder: Path) -> None:
    """Raise OwnershipError where another user than this one owns or may write the folder or anything in it.

    A checkpoint's `.metadata` is a pickle: to load it is to run what whoever wrote it wanted, and the digests beside it
    prove nothing, for he could write these too. Of a link the same holds for what it leads to. A group of this user
    alone, which many systems give by default, may write.
    """
    for path in (folder, *folder.rglob("*")):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):  # anybody may write a link's own mode, and what it leads to is what is read
            try:
                found = path.stat()
            except OSError:  # it leads nowhere, so nothing is read there
                continue
        who = _other_writer(found)
        if who:
            raise OwnershipError(
                f"{path} {who}, and resuming from it would run what they may have put there: if it is yours, "
                f"`chown -R {os.geteuid()} {folder} && chmod -R go-w {folder}`"
            )


def _other_writer(found: os.stat_result) -> str | None:
    """Why another user could have written it, None where none could."""
    if found.st_uid != os.geteuid():
        return f"belongs to the user with the number {found.st_uid}"
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"can be written by the group with the number {found.st_gid}"
    return None


def _is_own_group(gid: int) -> bool:
    """Is it the group that has this user's name and no other member?"""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and user.pw_gid == gid and not set(group.gr_mem) - {user.pw_name}
