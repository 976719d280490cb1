"""A reward computed on another machine, over HTTP: the client of `tasks.rewards.serve`.

The protocol is in docs/rewards.md.
"""

import io
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image

from models.errors import DoubleflowError
from tasks.credentials import CredentialError, read_secret
from tasks.rewards.base import Reward, RewardError, RewardResult, ScoredPrompt, register_reward

PROTOCOL = 1
TENSOR = "batch"
RETRIED = (429, 502, 503, 504)
"""Statuses after which the same request is sent again. A 500 is the reward's own failure, which the run retries."""


class RemoteFailure(DoubleflowError, RuntimeError):
    """The server could not score a batch; the message holds what it said."""


@register_reward("remote")
class RemoteReward(Reward):
    """Scores and details of the reward that a server hosts; its version is the server's."""

    def __init__(
        self,
        *,
        url: str,
        encoding: Literal["tensor", "png"] = "tensor",
        timeout_s: float = 300.0,
        max_retries: int = 4,
        token_env: str | None = None,
    ):
        """
        Args:
            url: of the server, as in "http://scorer:8100"; without user name and password.
            encoding: how pictures travel: as one safetensors tensor, or each as a PNG, which takes time and less of
                the network.
            timeout_s: for the server's answer to one batch.
            max_retries: requests after the first one, with exponential backoff or after the time that Retry-After
                names, where the connection fails or the server is busy or restarting.
            token_env: environment variable that holds the token for what stands before the server (a reverse proxy),
                sent as `Authorization: Bearer`; it must be set where the reward workers run. The token itself is never
                part of the configuration, an error or a log. Over a network it wants an https URL.

        Raises:
            RewardError: no server answers there, it speaks another protocol or wants other input, or the environment
                variable is not set.
        """
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util import Retry

        if encoding not in ("tensor", "png") or (encoding == "png" and self.wants != "images"):
            raise RewardError(f'{self.name}: encoding must be "tensor", or "png" for images, not {encoding!r}')
        retry = Retry(
            max_retries, backoff_factor=0.5, status_forcelist=RETRIED, allowed_methods=None, raise_on_status=False
        )
        try:
            self._token = read_secret(token_env, "token_env", self.name) if token_env is not None else None
        except CredentialError as error:
            raise RewardError(str(error)) from None
        self._session = requests.Session()
        self._session.auth = self._sign  # also where there is no token: else requests would look into ~/.netrc
        self._session.mount("http://", HTTPAdapter(max_retries=retry))
        self._session.mount("https://", HTTPAdapter(max_retries=retry))
        self._url, self._encoding, self._timeout = url.rstrip("/"), encoding, timeout_s
        hosted = self._hosted()
        if hosted["wants"] != self.wants:
            kind = {"images": "remote"}.get(hosted["wants"], f"remote_{hosted['wants']}")
            raise RewardError(
                f"{self.name}: the server at {url} hosts {hosted['name']}, which wants {hosted['wants']}: use {kind}"
            )
        self._remote_version = hosted["version"]
        self.version = f"{hosted['name']} {hosted['version']}"

    def score(self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Send the batch and wait.

        Raises:
            RewardError: the server says that the reward cannot be used so, or hosts another version than before.
            RemoteFailure: anything else went wrong there.
        """
        files = [("request", ("request.json", pack_request(prompts), "application/json"))]
        files += pack_images(batch) if self._encoding == "png" else [pack_tensor(batch)]
        response = self._session.post(f"{self._url}/v1/score", files=files, timeout=self._timeout)
        answer = self._answer(response)
        if answer["version"] != self._remote_version:
            raise RewardError(
                f"{self.name}: the server at {self._url} now hosts version {answer['version']!r} in place of "
                f"{self._remote_version!r}: scores of one run must be comparable"
            )
        return unpack_result(answer)

    def _hosted(self) -> dict[str, Any]:
        import requests

        try:
            response = self._session.get(f"{self._url}/v1/reward", timeout=self._timeout)
        except requests.RequestException as error:
            raise RewardError(f"{self.name}: no reward server answers at {self._url}: {error}") from error
        if response.status_code == 404:
            raise RewardError(
                f"{self.name}: {self._url} has no /v1/reward: it is no reward server, or speaks another protocol than "
                f"this client's {PROTOCOL}"
            )
        return self._answer(response)

    def _sign(self, request: Any) -> Any:
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def _told(self, text: Any) -> str:
        """A server's words; it may quote the token that it was given."""
        return str(text).replace(self._token, "***") if self._token else str(text)

    def _answer(self, response: Any) -> dict[str, Any]:
        """The body of a good response. Raises the errors of `score`."""
        if response.status_code in (401, 403):
            raise RewardError(
                f"{self.name}: {self._url} answered {response.status_code}: it wants a token that token_env names"
            )
        try:
            body = response.json()
        except ValueError as error:
            raise RemoteFailure(f"{self._url} answered {response.status_code} without JSON") from error
        if response.status_code == 400:
            raise RewardError(f"{self.name}: the server at {self._url} refuses: {self._told(body.get('error'))}")
        if not response.ok:
            raise RemoteFailure(f"{self._url} answered {response.status_code}: {self._told(body.get('error', body))}")
        check_protocol(body.get("protocol"), f"the server at {self._url}", "this client")
        return body


@register_reward("remote_video")
class RemoteVideoReward(RemoteReward):
    """As `remote`, for a hosted reward that wants whole videos."""

    wants = "video"


@register_reward("remote_latents")
class RemoteLatentsReward(RemoteReward):
    """As `remote`, for a hosted reward that wants latents."""

    wants = "latents"


def check_protocol(theirs: Any, who: str, we: str) -> None:
    """Raise RewardError unless the other side speaks this protocol."""
    if theirs != PROTOCOL:
        raise RewardError(
            f"{who} speaks reward protocol {theirs}, {we} {PROTOCOL}: install the same version of doubleflow on both"
        )


def pack_request(prompts: Sequence[ScoredPrompt]) -> bytes:
    """The part `request`."""
    rows = [{"prompt": p.prompt, "target": p.target, "metadata": dict(p.metadata)} for p in prompts]
    return json.dumps({"protocol": PROTOCOL, "prompts": rows}).encode()


def pack_tensor(batch: np.ndarray) -> tuple[str, tuple[str, bytes, str]]:
    """The part `tensor`: a safetensors file with one tensor, `batch`."""
    from safetensors.numpy import save

    content = save({TENSOR: np.ascontiguousarray(batch)})
    return "tensor", ("batch.safetensors", content, "application/octet-stream")


def pack_images(images: np.ndarray) -> list[tuple[str, tuple[str, bytes, str]]]:
    """The parts `images`, one PNG each."""
    parts = []
    for number, image in enumerate(images):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
        parts.append(("images", (f"{number}.png", buffer.getvalue(), "image/png")))
    return parts


def unpack_batch(tensor: bytes | None, images: Sequence[bytes]) -> np.ndarray:
    """The batch of a request. Raises RewardError where it is neither a tensor nor PNGs of one size."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    if (tensor is None) == (not images):
        raise RewardError("give either one part `tensor` or one part `images` a picture")
    try:
        if tensor is not None:
            return load(tensor)[TENSOR]
        return np.stack([np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in images])
    except (SafetensorError, KeyError, OSError, ValueError) as error:
        raise RewardError(f"the pictures cannot be read: {error}") from error


def unpack_result(answer: dict[str, Any]) -> RewardResult:
    """Scores and details of an answer; null is NaN."""
    scores = [np.nan if score is None else score for score in answer["scores"]]
    return RewardResult(np.array(scores, dtype=np.float64), answer["details"])
