# SPDX-License-Identifier: Apache-2.0
"""Addresses of the servers that rewards ask."""

from typing import Any
from urllib.parse import urlsplit

from tasks.rewards.errors import RewardError


def check_address(what: str, url: Any) -> None:
    """Raise RewardError for a text that is no http or https URL with a host; nothing is asked there.

    Args:
        what: begins the error's sentence: the reward and its option.
        url: of what kind it is, the option's annotation says.
    """
    if isinstance(url, str) and not _is_http(url):
        shown = url.rpartition("@")[2]  # before it a password may stand
        raise RewardError(f"{what} is {shown!r:.100}; it should begin with http:// or https:// and name a host")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that are no IPv6 address
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
