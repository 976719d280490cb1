# SPDX-License-Identifier: Apache-2.0
"""What differs from the commit, as a patch that takes no credentials along."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from models.errors import DoubleflowError
from tasks.system.credentials import KEY_FORMS

LARGEST_UNTRACKED = 1 << 20
"""Bytes; a larger file that git does not know is named in the record but not copied into the patch."""
LARGEST_SUM = 32 << 20
"""Bytes of all files of the patch: it is held in memory and copied to MLflow at every start."""

CREDENTIAL_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".pypirc", ".npmrc", ".htpasswd", ".my.cnf"),
    *(".git-credentials", ".boto", ".s3cfg", ".dockercfg", "kubeconfig*", "*.kubeconfig", "service_account*.json"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks"),
    *("*.keystore", "*.kdbx", "*.gpg", "*.asc", "*credential*", "*secret*", "*password*", "*passwd*"),
    *("*api_key*", "*api-key*", "*apikey*", "token", ".token", "*.token", "*_token", "*-token"),
    *("*_token.txt", "*_token.json"),
)
"""Names of files that hold keys by habit, in lower case."""
CREDENTIAL_FOLDERS = (".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".kube", ".ssh", "secrets", ".secrets")
HABITUALLY_IGNORED = (
    *("*.ipynb", "*.log", "*.pyc", "*.swp", "*~", "*.bak", "*.orig", ".ds_store", "*.sqlite", "*.sqlite3", "*.db"),
    *(".*_history", "core", "core.[0-9]*", "*.dump", "*.dmp"),
)
"""What most projects ignore, and this repository may have forgotten to: outputs of notebooks hold anything."""
IGNORED_FOLDERS = (
    *("__pycache__", ".venv", "venv", "node_modules", ".idea", ".vscode", ".ipynb_checkpoints", "wandb"),
    *(".cache", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".services", ".doubleflow"),
)
SOURCE = (".py", ".md")
"""A committed file that ends so is code or text, whatever it is called; of its change only the content is looked at."""
KEY_IN_TEXT = (
    KEY_FORMS + r"|[a-z][a-z0-9+.-]*://[^/@ :\"']+:[^/@ \"']+@"
    r"|([Aa][Pp][Ii]_?[Kk][Ee][Yy]|[Tt][Oo][Kk][Ee][Nn]|[Pp][Aa][Ss][Ss][Ww][Oo][Rr][Dd]|[Ss][Ee][Cc][Rr][Ee][Tt])"
    r"[\"']?[ ]*[:=][ ]*[\"'][^\"' ]{16,}[\"']"
)
"""Keys by their forms, passwords in addresses, and quoted values that are called a key; a POSIX expression."""

CREDENTIAL, HABIT, KEY, LARGE, SUM, REPOSITORY, UNREADABLE = (
    "its name is a credential's",
    "most projects ignore such files",
    "it holds what looks like a key or a password",
    f"larger than {LARGEST_UNTRACKED} bytes",
    f"the patch would be larger than {LARGEST_SUM} bytes",
    "a repository of its own",
    "git cannot read it",
)


class GitError(DoubleflowError, RuntimeError):
    """git failed; with its own words."""


@dataclass(frozen=True)
class CodeDifference:
    """What differs from the commit.

    Attributes:
        patch: for `git apply` on the commit.
        untracked_left_out: new files that are not in it -> why; bytes that are no UTF-8 as \\xff.
        tracked_left_out: the same of changed files that the commit has.
    """

    patch: bytes = b""
    untracked_left_out: dict[str, str] = field(default_factory=dict)
    tracked_left_out: dict[str, str] = field(default_factory=dict)


def code_difference(code: Path) -> CodeDifference:
    """The difference between the commit and the files that git does not ignore, without what may be a credential.

    Made in an index and an object store of its own, so the repository stays as it is.
    """
    with tempfile.TemporaryDirectory() as folder:
        objects = os.fsdecode(git(code, "rev-parse", "--path-format=absolute", "--git-path", "objects").rstrip(b"\n"))
        index = _Index(code, folder, objects)
        index.git("read-tree", "HEAD")
        changed = index.names("diff", "--name-only", "--no-renames", "-z", "HEAD")
        untracked = index.names("ls-files", "--others", "--exclude-standard", "-z")
        tracked_out = {name: CREDENTIAL for name in changed if _is_credential(name) and not name.endswith(SOURCE)}
        untracked_out = {name: reason for name in untracked if (reason := _reason(code, name))}
        room = LARGEST_SUM
        for names, out in ((changed, tracked_out), (untracked, untracked_out)):
            taken, room = _fitting(code, [name for name in names if name not in out], room)
            out |= {name: SUM for name in names if name not in out and name not in taken}
            out |= dict.fromkeys(index.add(taken), UNREADABLE)
        names_only = ("--cached", "--name-only", "--no-renames", "-z")
        for name in index.names("diff", *names_only, "--text", f"-G{KEY_IN_TEXT}", "HEAD"):
            (tracked_out if name in changed else untracked_out)[name] = KEY
        index.forget([*tracked_out, *untracked_out])
        plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/")
        patch = index.git("diff", "--cached", "--binary", "--full-index", *plain, "HEAD")
    return CodeDifference(patch, _readable(untracked_out), _readable(tracked_out))


class _Index:
    """An index and an object store beside the repository's."""

    def __init__(self, code: Path, folder: str, objects: str):
        self.code = code
        self.environment = {
            "GIT_INDEX_FILE": f"{folder}/index",
            "GIT_OBJECT_DIRECTORY": folder,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
            "GIT_LITERAL_PATHSPECS": "1",
        }

    def git(self, *arguments: str, given: bytes | None = None) -> bytes:
        return git(self.code, *arguments, given=given, **self.environment)

    def names(self, *arguments: str) -> list[str]:
        """The names that a command with -z prints, undecodable bytes kept."""
        return [os.fsdecode(name) for name in self.git(*arguments).split(b"\0") if name]

    def add(self, names: Sequence[str]) -> list[str]:
        """Take the files' present content, or their absence; those that git could not read."""
        if not names:
            return []
        try:
            self.git("add", "--all", "--ignore-errors", *PATHS_GIVEN, given=_joined(names))
        except GitError:  # it has added the others
            differing = {*self.names("diff", "--name-only", "-z"), *self.names("ls-files", "--others", "-z")}
            return [name for name in names if name in differing]
        return []

    def forget(self, names: Sequence[str]) -> None:
        """As the commit has them."""
        if names:
            self.git("reset", "--quiet", *PATHS_GIVEN, "HEAD", given=_joined(names))


PATHS_GIVEN = ("--pathspec-from-file=-", "--pathspec-file-nul")


def _reason(code: Path, name: str) -> str | None:
    """Why a new file stays out of the patch, None where it may be in."""
    if name.endswith("/"):
        return REPOSITORY
    if _is_credential(name):
        return CREDENTIAL
    path = PurePosixPath(name.lower())
    if _matches(path.name, HABITUALLY_IGNORED) or not set(IGNORED_FOLDERS).isdisjoint(path.parts[:-1]):
        return HABIT
    return LARGE if _size(code, name) > LARGEST_UNTRACKED else None


def _is_credential(name: str) -> bool:
    path = PurePosixPath(name.lower())
    return _matches(path.name, CREDENTIAL_FILES) or not set(CREDENTIAL_FOLDERS).isdisjoint(path.parts[:-1])


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _fitting(code: Path, names: Iterable[str], room: int) -> tuple[list[str], int]:
    """(the names whose files fit into `room` bytes, the smaller ones first; what is left of it)."""
    taken = []
    for size, name in sorted((_size(code, name), name) for name in names):
        if size <= room:
            taken.append(name)
            room -= size
    return taken, room


def _size(code: Path, name: str) -> int:
    try:
        return (code / name).lstat().st_size
    except OSError:  # deleted
        return 0


def _joined(names: Iterable[str]) -> bytes:
    return b"\0".join(os.fsencode(name) for name in names)


def _readable(reasons: dict[str, str]) -> dict[str, str]:
    return {os.fsencode(name).decode(errors="backslashreplace"): reasons[name] for name in sorted(reasons)}


def git(folder: Path, *arguments: str, given: bytes | None = None, **environment: str) -> bytes:
    """Output of a git command.

    Raises:
        GitError: it failed.
    """
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, env=os.environ | environment, input=given, capture_output=True)
    if done.returncode:
        words = re.sub(r"\s+", " ", done.stderr.decode(errors="backslashreplace")).strip()
        raise GitError(f"`git {arguments[0]}` failed in {folder}: {words[-1000:]}")
    return done.stdout
