# SPDX-License-Identifier: Apache-2.0
"""Where the model of `reward.reward_model` is: in the environment of a worker whose reward asks it."""

import os
from dataclasses import dataclass

from tasks.rewards.errors import RewardError
from tasks.system.ports import LOOPBACK

URL = "REWARD_MODEL_URL"
NAME = "REWARD_MODEL_NAME"
KEY = "REWARD_MODEL_KEY"
VERSION = "REWARD_MODEL_VERSION"


class NotServed(RewardError):
    """The model's server does not start or wake up, and is not tried again: whoever asks has no scores any more."""


@dataclass(frozen=True)
class ServedModel:
    """A model behind the OpenAI API.

    Attributes:
        url: of the API, as in "http://127.0.0.1:8000/v1".
        name: of the model there.
        version: of its weights.
        key: the secret that the server asks for.
    """

    url: str
    name: str
    version: str
    key: str

    def __repr__(self) -> str:
        """Without the secret."""
        return f"ServedModel({self.url}, {self.name}, {self.version})"

    def enter_environment(self) -> None:
        """Let the rewards of this process find it."""
        os.environ.update({URL: self.url, NAME: self.name, VERSION: self.version, KEY: self.key})
        for variable in ("NO_PROXY", "no_proxy"):  # it is on this machine
            os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), LOOPBACK)))


def url() -> str | None:
    """The address of the served model's API; None where this process has no such model."""
    return os.environ.get(URL)


def name() -> str | None:
    """The model's name there."""
    return os.environ.get(NAME)


def version() -> str | None:
    """The version of the model's weights."""
    return os.environ.get(VERSION)


def address() -> str | None:
    """host:port of the server."""
    found = url()
    return None if found is None else found.removeprefix("http://").removesuffix("/v1")
