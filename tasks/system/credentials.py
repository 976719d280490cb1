# SPDX-License-Identifier: Apache-2.0
"""What must not stand in a config, a record or an error: passwords in URLs, and keys as options."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from models.errors import DoubleflowError

SECRET_NAME = re.compile(
    r"(?:.*[_-])?(?:api_?key|access_?key|secret_?key|private_?key|auth_?key|token|passwords?|passwd|secrets?|credentials?"
    r"|bearer|authorization)|key",
    re.IGNORECASE,
)
"""Names of options that hold a secret. What ends in `_env` names an environment variable and is none."""


class CredentialError(DoubleflowError, ValueError):
    """A secret was given where it would be recorded."""


def refuse_password_in_url(url: str, field: str, instead: str) -> None:
    """Raise CredentialError, which does not repeat the URL's secret, where the URL holds `user:password@`.

    Args:
        url: anything else passes, too.
        field: its name, for the error.
        instead: how the secret should be given.
    """
    if without_password(url) != url:
        raise CredentialError(
            f"{field} {without_password(url)!r} holds a user name or a password, which would be recorded with the run: "
            f"leave it out and {instead}"
        )


def without_password(url: str) -> str:
    """The URL with *** in place of `user:password`; an address without an authority stays as it is."""
    try:
        authority = urlsplit(url).netloc
    except ValueError:  # brackets that are no IPv6 address
        authority = url.partition("://")[2].partition("/")[0]
    if "@" not in authority:
        return url
    return url.replace(authority, f"***@{authority.rpartition('@')[2]}", 1)


def refuse_secret_options(options: Mapping[str, Any], what: str) -> None:
    """Raise CredentialError for an option, however deep, whose name says that it holds a secret, or for such a URL."""
    for path, value in _texts(options):
        name = path.rpartition(".")[2]
        if _is_secret(name):
            raise CredentialError(
                f"{what}: the option {path} looks like a secret, which would be recorded with the run: put it into an "
                f"environment variable and give that variable's name, as in {name}_env"
            )
        refuse_password_in_url(
            value,
            f"{what}: the option {path}",
            "give it by an environment variable, as token_env and api_key_env name one",
        )


def refuse_secret_words(words: Sequence[str], what: str) -> None:
    """Raise CredentialError for `--api-key VALUE`, `api_key=VALUE` and the like among a program's words, or such a URL.

    Args:
        words: the program's, as other users see them in the list of processes.
        what: where they stand, for the error.
    """
    for word, following in zip(words, [*words, "-"][1:], strict=True):
        name, equals, value = word.lstrip("-").partition("=")
        has_value = bool(value) if equals else word.startswith("-") and not following.startswith("-")
        if has_value and _is_secret(name):
            raise CredentialError(
                f"{what}: {name} looks like a secret, which would be recorded with the run and stand in the list of "
                "processes: leave it out and set the environment variable that the program reads it from"
            )
        refuse_password_in_url(value or word, f"{what}: {name}" if equals else what, "use an environment variable")


def _is_secret(name: str) -> bool:
    """Does an option, a header or a word of a command line hold a secret, by its name?"""
    return SECRET_NAME.fullmatch(name.replace("-", "_")) is not None


def _texts(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, value) of every text in a tree of mappings and lists."""
    if isinstance(tree, str):
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _texts(value, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _texts(value, path)


def read_secret(variable: str, field: str, what: str) -> str:
    """The value of an environment variable that holds a secret.

    Raises:
        CredentialError: it is not set or empty.
    """
    value = os.environ.get(variable)
    if not value:
        raise CredentialError(
            f"{what}: {field} is {variable}, but that environment variable is not set where the reward workers run: "
            f"export it before Ray starts, or leave {field} out"
        )
    return value
