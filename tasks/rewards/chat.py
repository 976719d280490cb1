# SPDX-License-Identifier: Apache-2.0
"""A reward that asks a model behind an OpenAI-compatible API about each picture: the connection, its key, an answer."""

import base64
import io
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, TypedDict

import numpy as np
from PIL import Image
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from models.errors import DoubleflowError
from tasks.rewards import served
from tasks.rewards.addresses import check_address
from tasks.rewards.base import Reward
from tasks.rewards.errors import RewardError

READ = 4000
"""Characters of the longest answer that is read; a longer one is unusable."""
KEPT_BACK, MOST_KEPT_BACK_S = 0.1, 10.0
"""Of the seconds that a batch may take, for what follows when its time is over: their share, and how many at most."""
_ends: ContextVar[float] = ContextVar("ends", default=math.inf)


@contextmanager
def asked_within(seconds: float) -> Iterator[None]:
    """Let a reward that is called in this block ask for a little less than so many seconds from now on, as its worker
    ends with the process."""
    token = _ends.set(time.monotonic() + seconds - min(seconds * KEPT_BACK, MOST_KEPT_BACK_S))
    try:
        yield
    finally:
        _ends.reset(token)


def seconds_left() -> float:
    """To ask in, see `asked_within`; infinite outside of its block. An event loop's tasks do not see the block."""
    return _ends.get() - time.monotonic()


class UnusableAnswer(DoubleflowError, ValueError):
    """The judge answered, but not the question."""


class ChatOptions(TypedDict, total=False):
    """Options of a `ChatReward` that its subclasses hand on; it says what they are."""

    base_url: str | None
    model: str | None
    api_key_env: str | None
    temperature: float
    top_p: float
    max_tokens: int
    timeout_s: float
    max_retries: int


class ChatReward(Reward):
    """A client of one server, which asks again by itself.

    Its retries (exponential backoff, or what `Retry-After` says) cover 408, 409, 429, 5xx, lost connections and
    time-outs.

    Attributes:
        sampling: which model answers, and how its answers are sampled.
        asked: the model's name, and the version of its weights where the run serves it.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        model: str | None = None,
        api_key_env: str | None = None,
        temperature: NonNegativeFloat = 0.0,
        top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
        max_tokens: PositiveInt = 256,
        timeout_s: PositiveFloat = 60.0,
        max_retries: NonNegativeInt = 4,
    ) -> None:
        """Who is asked, and how answers are sampled; nothing is sent yet.

        Args:
            base_url: of the API, as in "http://judge:8000/v1"; one with a user name and password is refused. Without
                one the model of `reward.reward_model` is asked.
            model: as the server at `base_url` calls it.
            api_key_env: environment variable that holds the API key; it must be set where the reward workers run.
                The key itself is never part of the configuration, an error or a log.
            temperature, top_p, max_tokens: how the answer is sampled.
            timeout_s: for one request.
            max_retries: requests after the first one, where the server or the way to it fails.

        Raises:
            RewardError: there is nobody to ask, or the environment variable is not set.
        """
        import openai

        weights = ""
        if base_url is None:
            base_url, model, api_key_env = served.url(), served.name(), served.KEY
            weights = f" {served.version()}"
            if base_url is None:
                raise RewardError(
                    f"{self.name}: base_url is missing and this process has no served model: give base_url and model, "
                    "or let a run serve one with reward.reward_model"
                )
        self._key = self._read_key(api_key_env)
        self._client = openai.AsyncOpenAI(
            base_url=base_url, api_key=self._key or "none", timeout=timeout_s, max_retries=max_retries
        )
        self.sampling = {"model": model, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        self.asked = f"{model}{weights}"

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """An address is one of HTTP and comes with a model's name, and neither the name nor a key's variable without an
        address."""
        check_address(f"reward {name!r}: base_url", options.get("base_url"))
        given = {field for field in ("base_url", "model", "api_key_env") if options.get(field) is not None}
        if "base_url" in given and "model" not in given:
            raise RewardError(f"reward {name!r}: base_url is given without model: say how the server there calls it")
        if given and "base_url" not in given:
            raise RewardError(
                f"reward {name!r}: {min(given)} is given without base_url: give it too, or leave both out to ask the "
                "model of reward.reward_model"
            )

    @classmethod
    def asks_reward_model(cls, options: Mapping[str, Any]) -> bool:
        """Where no address is given."""
        return options.get("base_url") is None

    async def answer(self, image: np.ndarray, question: str) -> str:
        """What the model says of a uint8 picture [H, W, 3].

        Raises:
            UnusableAnswer: nothing, or more than is read.
            openai.OpenAIError: no answer came.
        """
        content = [
            {"type": "image_url", "image_url": {"url": data_url(image)}},
            {"type": "text", "text": question},
        ]
        messages: list = [{"role": "user", "content": content}]
        response = await self._client.chat.completions.create(messages=messages, **self.sampling)  # type: ignore[call-overload]
        choices = getattr(response, "choices", None)
        message = getattr(choices[0], "message", None) if choices else None  # none of what a filter has held back
        said, ended = getattr(message, "content", None), choices[0].finish_reason if choices else None
        if not isinstance(said, str) or not said:
            why = f" (finish_reason {ended!r:.60})" if ended not in (None, "stop") else ""
            raise UnusableAnswer(f"the answer is empty{why}" if not said else "the answer is no text")
        if ended == "length":
            raise UnusableAnswer(f"the answer was cut off at max_tokens {self.sampling['max_tokens']}")
        if len(said) > READ:
            raise UnusableAnswer(f"the answer has {len(said)} characters, more than {READ}")
        return said

    def _read_key(self, variable: str | None) -> str | None:
        if variable is None:
            return None
        key = os.environ.get(variable)
        if not key:
            raise RewardError(
                f"{self.name}: api_key_env is {variable}, but that environment variable is not set where the reward "
                "workers run: export it before Ray starts, or leave api_key_env out"
            )
        return key

    def in_words(self, error: Exception) -> str:
        """The error in words; a server may quote the key it was given."""
        text = f"{type(error).__name__}: {error}"
        return text.replace(self._key, "***") if self._key else text


def data_url(image: np.ndarray) -> str:
    """A uint8 picture [H, W, 3] as the PNG data URL that the API takes."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
