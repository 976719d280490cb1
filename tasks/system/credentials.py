# SPDX-License-Identifier: Apache-2.0
"""What must not stand in a config, a record or an error: passwords in URLs, and keys by their names and forms."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from models.errors import DoubleflowError

SECRET_NAME = re.compile(
    r"(?:.*_)?(?:api_?keys?|access_?keys?|secret_?keys?|private_?keys?|auth_?keys?|signing_key|encryption_key"
    r"|account_key|subscription_key|ssh_key|token|passwords?|passwd|passphrases?|pwd|secrets?|credentials?|cookies?"
    r"|bearer|authorization)|key|auth|basic_auth",
    re.IGNORECASE,
)
"""Names of options that hold a secret. What ends in `_env` names an environment variable and is none."""
KEY_VARIABLE = re.compile(r"[A-Z0-9_]+_KEY")
"""Names of environment variables that hold one."""
TOKENIZERS = re.compile(r"(?:.*_)?(?:bos|eos|pad|unk|stop|mask|sep|cls|image|special)_token", re.IGNORECASE)
"""Tokens that are no secret."""
NUMBER_TOO = re.compile(r"passw|passphrase|pwd|secret|api_?key|credential", re.IGNORECASE)
"""Within a secret's name: there a number is one, too. A token may be counted by one, or be a tokenizer's."""
SIGNATURE = re.compile(r"(?:x_amz_|x_goog_)?(?:sig|signature)|sas", re.IGNORECASE)
"""Of an address that lets in whoever has it."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Name of an environment variable."""
NAMED_VALUE = re.compile(r"""([\w-]+)["']?[ ]*[:=](?=[ ]*["']?[^\s"'${])""")
"""A name and the beginning of its value, within a command, a header or JSON."""
KEY_FORMS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_[A-Za-z0-9_]{30,}|glpat-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(^|[^A-Za-z0-9_-])(sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,})"
    r"|AIza[A-Za-z0-9_-]{35}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\."
)
"""Keys by the shapes that their issuers give them; a POSIX expression, which git takes too."""
KEY = re.compile(KEY_FORMS)
DRAWN = re.compile(r"(?=.*[0-9]).*[A-Z]", re.DOTALL)
"""Of what begins with sk-: a folder's name may begin so as well, and is hardly drawn at random."""
HEADER = re.compile(r"\b(?:bearer|basic)\s+(?=\S*[0-9])[A-Za-z0-9._~+/=-]{12,}", re.IGNORECASE)
"""The value of an Authorization header."""


class CredentialError(DoubleflowError, ValueError):
    """A secret was given where it would be recorded."""


def refuse_password_in_url(url: str, field: str, instead: str) -> None:
    """Raise CredentialError, which does not repeat the URL's secret, where the URL holds `user:password@` or `?token=`.

    Args:
        url: anything else passes, too.
        field: its name, for the error.
        instead: how the secret should be given.
    """
    if without_password(url) != url:
        raise CredentialError(
            f"{field} {without_password(url)!r} holds a user name, a password or a key, which would be recorded with "
            f"the run: leave it out and {instead}"
        )


def without_password(url: str) -> str:
    """The URL with *** in place of `user:password` and of the values of `?token=` and the like; an address without an
    authority keeps what stands before its path."""
    shown = _without_secret_parameters(url)
    try:
        authority = urlsplit(url).netloc
    except ValueError:  # brackets that are no IPv6 address
        authority = url.partition("://")[2].partition("/")[0]
    if "@" not in authority:
        return shown
    return shown.replace(authority, f"***@{authority.rpartition('@')[2]}", 1)


def _without_secret_parameters(url: str) -> str:
    """With *** in place of the values of secrets behind `?`, `&` and `#`."""
    address, mark, parameters = url.partition("?") if "?" in url else url.partition("#")
    if "://" not in address or not mark:
        return url
    return address + mark + re.sub(r"([\w-]+)=([^&#;]+)", _masked_parameter, parameters)


def _masked_parameter(found: re.Match[str]) -> str:
    secret = _is_secret(found[1]) or SIGNATURE.fullmatch(found[1].replace("-", "_"))
    return f"{found[1]}=***" if secret else found[0]


def refuse_secret_options(options: Mapping[str, Any], what: str) -> None:
    """Raise CredentialError for an option, however deep, whose name says that it holds a secret, for an address with
    one, for a text in the form of a key, and for what stands where a variable's name should. None is repeated."""
    for path, value in _leaves(options):
        name = path.rpartition(".")[2]
        if _is_secret(name) and (isinstance(value, str) or NUMBER_TOO.search(name)):
            raise CredentialError(
                f"{what}: the option {path} looks like a secret, which would be recorded with the run: put it into an "
                f"environment variable and give that variable's name, as in {name}_env"
            )
        if not isinstance(value, str):
            continue
        if _is_secret(name.removesuffix("_env")) and not VARIABLE.fullmatch(value):
            raise CredentialError(
                f"{what}: the option {path} is no name of an environment variable, and what else it is would be "
                "recorded with the run: put the key into a variable and give that one's name"
            )
        if _holds_key(value):
            raise CredentialError(
                f"{what}: {path} holds what looks like a key, which would be recorded with the run: put it into an "
                "environment variable and give that variable's name, as in token_env and api_key_env"
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
        named = [name] if has_value else []
        secret = next((one for one in [*named, *NAMED_VALUE.findall(word)] if _is_secret(one)), None)
        if secret is not None or _holds_key(word):
            raise CredentialError(
                f"{what}: {secret or 'a word'} looks like a secret, which would be recorded with the run and stand in "
                "the list of processes: leave it out and set the environment variable that the program reads it from"
            )
        refuse_password_in_url(value or word, f"{what}: {name}" if equals else what, "use an environment variable")


def _is_secret(name: str) -> bool:
    """Does an option, a header or a word of a command line hold a secret, by its name?"""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.replace("-", "_"))
    if TOKENIZERS.fullmatch(name):
        return False
    return bool(SECRET_NAME.fullmatch(name) or KEY_VARIABLE.fullmatch(name))


def _holds_key(text: str) -> bool:
    """Is there a key in the text, by its form?"""
    found = HEADER.search(text) or KEY.search(text)
    return found is not None and ("sk-" not in found[0] or DRAWN.match(found[0]) is not None)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str | float]]:
    """(path, value) of every text and number in a tree of mappings and lists."""
    if isinstance(tree, str | int | float) and not isinstance(tree, bool):
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value, path)


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
