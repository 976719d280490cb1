# SPDX-License-Identifier: Apache-2.0
"""A reward computed on another machine, over HTTP: the client of `tasks.rewards.serve`.

The protocol is in docs/rewards.md.
"""

import io
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, Self, TypeVar

import numpy as np
import requests
from PIL import Image
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator
from requests.adapters import HTTPAdapter
from safetensors import SafetensorError
from safetensors.numpy import load, save
from urllib3.exceptions import ReadTimeoutError
from urllib3.util import Retry

from models.errors import DoubleflowError
from tasks.rewards.addresses import check_address
from tasks.rewards.base import Reward, RewardResult, register_reward
from tasks.rewards.errors import RewardError
from tasks.rewards.scored_prompt import ScoredPrompt
from tasks.system.credentials import CredentialError, read_secret

PROTOCOL = 1
TENSOR = "batch"
RETRIED = (429, 502, 503, 504)
"""Statuses after which the same request is sent again. A 500 is the reward's own failure, which the run retries."""


MAX_PIXELS = 4096 * 4096
"""Of one PNG, unless the server is told otherwise."""
MAX_REQUEST_MB = 1024.0
"""Of one request, and of its pictures when they are unpacked, unless the server is told otherwise; 10^6 bytes each."""
MAX_PICTURES = 1000
"""PNGs of one request, unless the server is told otherwise."""
FORM_BYTES, PART_BYTES = 1000, 300
"""More than what is around the parts of a request, and around one part."""
CRITICAL_CHUNKS = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
"""Of a PNG: a reader that does not know one with a capital letter cannot show the picture."""


class TooLarge(RewardError):
    """A request is larger than the server takes."""


class RemoteFailure(DoubleflowError, RuntimeError):
    """The server could not score a batch; the message holds what it said."""


class ReadOnce(Retry):
    """Sends nothing again after a read timeout: the server is still at that batch, and would compute each copy."""

    def increment(self, *args: Any, **named: Any) -> Self:
        """What is left of the retries; raises the error of a read timeout."""
        if isinstance(error := named.get("error"), ReadTimeoutError):
            raise error
        return super().increment(*args, **named)


class Taken(BaseModel):
    """What a server takes in one request; the defaults are those of one that does not say it."""

    model_config = ConfigDict(strict=True)

    max_request_mb: PositiveFloat = MAX_REQUEST_MB
    max_pictures: PositiveInt = MAX_PICTURES


class Hosted(BaseModel):
    """What a server says of its reward."""

    model_config = ConfigDict(strict=True)

    name: str
    version: str
    wants: str
    limits: Taken = Taken()


class Answer(BaseModel):
    """What a server says of a batch; a detail's values are looked at by `Reward`."""

    model_config = ConfigDict(strict=True)

    version: str
    scores: list[float | None]
    details: dict[str, list[Any]]
    raised: list[list[NonNegativeInt]] = []

    @model_validator(mode="after")
    def _raised_are_of_the_batch(self) -> Self:
        if any(index >= len(self.scores) for together in self.raised for index in together):
            raise ValueError("raised names samples beyond its scores")
        return self


Body = TypeVar("Body", bound=BaseModel)
Part = tuple[str, tuple[str, bytes, str]]
"""Of a form: its name, and name, content and type of its file."""


@register_reward("remote")
class RemoteReward(Reward):
    """Scores and details of the reward that a server hosts; its version is the server's."""

    def __init__(
        self,
        *,
        url: str,
        encoding: Literal["tensor", "png"] = "tensor",
        timeout_s: PositiveFloat = 300.0,
        max_retries: NonNegativeInt = 4,
        token_env: str | None = None,
    ):
        """
        Args:
            url: of the server, as in "http://scorer:8100"; without user name and password.
            encoding: how pictures travel: as one safetensors tensor, or each as a PNG, which takes time and less of
                the network.
            timeout_s: for the server's answer to one request; none is sent again after it, as the server is still at
                it.
            max_retries: requests after the first one, with exponential backoff or after the time that Retry-After
                names, where the connection fails or the server is busy or restarting.
            token_env: environment variable that holds the token for what stands before the server (a reverse proxy),
                sent as `Authorization: Bearer`; it must be set where the reward workers run. The token itself is never
                part of the configuration, an error or a log. Over a network it wants an https URL.

        Raises:
            RewardError: no server answers there, it speaks another protocol or wants other input, or the environment
                variable is not set.
        """
        if encoding not in ("tensor", "png") or (encoding == "png" and self.wants != "images"):
            raise RewardError(f'{self.name}: encoding must be "tensor", or "png" for images, not {encoding!r}')
        retry = ReadOnce(
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
        if hosted.wants != self.wants:
            kind = {"images": "remote"}.get(hosted.wants, f"remote_{hosted.wants}")
            raise RewardError(
                f"{self.name}: the server at {url} hosts {hosted.name}, which wants {hosted.wants}: use {kind}"
            )
        self._remote_version, self._taken = hosted.version, hosted.limits
        self.version = f"{hosted.name} {hosted.version}"

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """The address is one of HTTP."""
        super().check_options(name, options)
        check_address(f"reward {name!r}: url", options["url"])

    def score(self, batch: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Send the batch, in as many requests as the server's limits ask for, and wait for each.

        Raises:
            RewardError: the server says that the reward cannot be used so, or hosts another version than before.
            RemoteFailure: anything else went wrong there, or the answer is not as the protocol says.
        """
        pictures = pack_images(batch) if self._encoding == "png" else None
        sizes = sample_bytes(batch, prompts, pictures)
        most = self._taken.max_request_mb * 1e6 - FORM_BYTES
        results = []
        for share in shares(sizes, most, self._taken.max_pictures if pictures else math.inf):
            parts = [pack_tensor(batch[share])] if pictures is None else pictures[share]
            results.append(self._scored(parts, prompts[share]))
        return joined(results)

    def _scored(self, parts: list[Part], prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """By one request. Raises the errors of `score`."""
        files = [("request", ("request.json", pack_request(prompts), "application/json")), *parts]
        try:
            response = self._session.post(f"{self._url}/v1/score", files=files, timeout=self._timeout)
        except requests.ReadTimeout as error:
            raise RemoteFailure(
                f"{self._url} gave no answer within timeout_s {self._timeout:g} and was still at the {len(prompts)} "
                "samples, which are not sent to it again: give the option timeout_s more seconds, or the reward a "
                "smaller batch_size"
            ) from error
        except (requests.RequestException, ValueError) as error:  # ValueError: it sends on to what is no address
            raise RemoteFailure(f"{self._url} gives no answer that can be read: {self._told(error)}") from error
        answer = self._answer(response, Answer)
        if answer.version != self._remote_version:
            raise RewardError(
                f"{self.name}: the server at {self._url} now hosts version {answer.version!r} in place of "
                f"{self._remote_version!r}: scores of one run must be comparable"
            )
        sizes = {"scores": len(answer.scores)} | {name: len(values) for name, values in answer.details.items()}
        wrong = {name: size for name, size in sizes.items() if size != len(prompts)}
        if wrong:
            raise RemoteFailure(
                f"{self._url} answered with {self._told(wrong)} values in place of one for each of {len(prompts)} "
                "samples"
            )
        return unpack_result(answer)

    def _hosted(self) -> Hosted:
        try:
            response = self._session.get(f"{self._url}/v1/reward", timeout=self._timeout)
        except (requests.RequestException, ValueError) as error:
            raise RewardError(f"{self.name}: no reward server answers at {self._url}: {self._told(error)}") from error
        if response.status_code == 404:
            raise RewardError(
                f"{self.name}: {self._url} has no /v1/reward: it is no reward server, or speaks another protocol than "
                f"this client's {PROTOCOL}"
            )
        return self._answer(response, Hosted)

    def _sign(self, request: Any) -> Any:
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def _told(self, text: Any) -> str:
        """A server's words; it may quote the token that it was given."""
        return str(text).replace(self._token, "***") if self._token else str(text)

    def _answer(self, response: Any, form: type[Body]) -> Body:
        """The body of a good response. Raises the errors of `score`."""
        if response.status_code in (401, 403):
            raise RewardError(
                f"{self.name}: {self._url} answered {response.status_code}: it wants a token that token_env names"
            )
        try:
            # Whatever it says of itself or of a sample is recorded, and it may repeat the token.
            body = json.loads(self._told(response.content.decode()))
        except (ValueError, RecursionError) as error:
            raise RemoteFailure(f"{self._url} answered {response.status_code} without JSON") from error
        if not isinstance(body, dict):
            raise RemoteFailure(f"{self._url} answered {response.status_code} with JSON that is no object")
        if response.status_code in (400, 413):
            raise RewardError(f"{self.name}: the server at {self._url} refuses: {self._told(body.get('error'))}")
        if not response.ok:
            raise RemoteFailure(f"{self._url} answered {response.status_code}: {self._told(body.get('error', body))}")
        check_protocol(body.get("protocol"), f"the server at {self._url}", "this client")
        try:
            return form.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = self._told(".".join(str(part) for part in first["loc"]))
            raise RemoteFailure(f"{self._url} answered not as the protocol says: {place}: {first['msg']}") from None


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
    if theirs != PROTOCOL or isinstance(theirs, bool):
        raise RewardError(
            f"{who} speaks reward protocol {theirs}, {we} {PROTOCOL}: install the same version of doubleflow on both"
        )


def pack_request(prompts: Sequence[ScoredPrompt]) -> bytes:
    """The part `request`."""
    rows = [{"prompt": p.prompt, "target": p.target, "metadata": dict(p.metadata)} for p in prompts]
    return json.dumps({"protocol": PROTOCOL, "prompts": rows}).encode()


def pack_tensor(batch: np.ndarray) -> Part:
    """The part `tensor`: a safetensors file with one tensor, `batch` [B, ...]."""
    content = save({TENSOR: np.ascontiguousarray(batch)})
    return "tensor", ("batch.safetensors", content, "application/octet-stream")


def pack_images(images: np.ndarray) -> list[Part]:
    """The parts `images` of pictures [B, H, W, 3], one PNG each."""
    parts = []
    for number, image in enumerate(images):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
        parts.append(("images", (f"{number}.png", buffer.getvalue(), "image/png")))
    return parts


def sample_bytes(batch: np.ndarray, prompts: Sequence[ScoredPrompt], pictures: Sequence[Part] | None) -> list[int]:
    """What each sample of a batch [B, ...] adds to its request: its prompt, and the larger of its PNG and what that
    unpacks to, both of which a server limits; without PNGs its part of the tensor."""
    contents = [0] * len(batch) if pictures is None else [len(content) for _, (_, content, _) in pictures]
    return [
        max(sample.nbytes, content) + len(pack_request([prompt])) + PART_BYTES
        for sample, content, prompt in zip(batch, contents, prompts, strict=True)
    ]


def shares(sizes: Sequence[int], max_bytes: float, max_samples: float) -> list[slice]:
    """A batch of samples of these bytes, cut into what one request may have; a larger sample is in one by itself."""
    found, begin, held = [], 0, 0
    for number, size in enumerate(sizes):
        if number > begin and (held + size > max_bytes or number - begin >= max_samples):
            found.append(slice(begin, number))
            begin, held = number, 0
        held += size
    return [*found, slice(begin, len(sizes))]


def joined(results: Sequence[RewardResult]) -> RewardResult:
    """The result of a batch out of those of its shares; a detail that one of them lacks is None there."""
    sizes = [len(result.scores) for result in results]
    names = dict.fromkeys(name for result in results for name in result.details)
    details: dict[str, list] = {name: [] for name in names}
    for result, size in zip(results, sizes, strict=True):
        for name in names:
            details[name] += result.details.get(name, [None] * size)
    raised = tuple(
        tuple(begin + index for index in together)
        for begin, result in zip(accumulate(sizes, initial=0), results, strict=False)
        for together in result.raised
    )
    return RewardResult(np.concatenate([result.scores for result in results]), details, raised=raised)


def unpack_batch(
    tensor: bytes | None,
    images: Sequence[bytes],
    max_pixels: int = MAX_PIXELS,
    max_mb: float = MAX_REQUEST_MB,
) -> np.ndarray:
    """The batch [B, ...] of a request. Pictures that are too large are refused by what their headers say, before any
    is decoded.

    Raises:
        TooLarge: a picture has more than `max_pixels`, or all together take more than `max_mb`, 10^6 bytes each.
        RewardError: it is neither a tensor nor PNGs of one size.
    """
    if (tensor is None) == (not images):
        raise RewardError("give either one part `tensor` or one part `images` a picture")
    if tensor is None:
        return _decoded(images, max_pixels, max_mb)
    try:
        batch = load(tensor)[TENSOR]
    except (SafetensorError, KeyError, TypeError, AttributeError, OSError, ValueError) as error:
        raise RewardError(f"the pictures cannot be read: {error}") from error
    if batch.size == 0:
        raise RewardError(f"the tensor `{TENSOR}` is empty: {batch.shape}")
    return batch


def _decoded(images: Sequence[bytes], max_pixels: int, max_mb: float) -> np.ndarray:
    unreadable = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)
    opened: list[Image.Image] = []
    for number, image in enumerate(images):
        width, height = _png_size(image, number)
        if width * height > max_pixels:
            raise TooLarge(
                f"picture {number} has {width} x {height} pixels, and at most {max_pixels} are taken: send "
                "a smaller one, or start the server with a larger --max-pixels"
            )
        _check_chunks(image, number)
        try:
            opened.append(Image.open(io.BytesIO(image), formats=("PNG",)))
        except (*unreadable, Image.DecompressionBombError) as error:
            raise RewardError(f"the pictures cannot be read: picture {number} is a broken PNG") from error
        if opened[-1].size != (width, height):
            raise RewardError(f"the pictures cannot be read: picture {number} has two headers")
    sizes = {picture.size for picture in opened}
    if len(sizes) > 1:
        raise RewardError(f"the pictures cannot be read: they must be of one size, not {sorted(sizes)}")
    width, height = sizes.pop()
    if len(opened) * width * height * 3 > max_mb * 1e6:
        raise TooLarge(
            f"{len(opened)} pictures of {width} x {height} pixels take more than {max_mb:g} MB unpacked: send "
            "fewer, or start the server with a larger --max-request-mb"
        )
    batch = np.empty((len(opened), height, width, 3), np.uint8)
    for number, picture in enumerate(opened):
        try:
            with picture:
                batch[number] = np.asarray(picture.convert("RGB"))
        except unreadable as error:
            raise RewardError(f"the pictures cannot be read: picture {number}: {error}") from error
    return batch


def _png_size(image: bytes, number: int) -> tuple[int, int]:
    """(width, height) by the header, which a PNG begins with: its signature and the chunk IHDR."""
    if len(image) < 24 or image[:8] != b"\x89PNG\r\n\x1a\n" or image[12:16] != b"IHDR":
        raise RewardError(f"the pictures cannot be read: picture {number} is no PNG")
    width, height = struct.unpack(">II", image[16:24])
    if width * height == 0:
        raise RewardError(f"the pictures cannot be read: picture {number} has {width} x {height} pixels")
    return width, height


def _check_chunks(image: bytes, number: int) -> None:
    """A PNG's chunks are whole and of kinds that a reader knows; Pillow passes over the checksums of the pixels.

    Raises:
        RewardError: a checksum is of other bytes, the end is missing, or a critical chunk is of an unknown kind.
    """
    place, kind = 8, b""
    while kind != b"IEND":
        if place + 12 > len(image):
            raise RewardError(f"the pictures cannot be read: picture {number} has no end")
        (length,), kind = struct.unpack_from(">I", image, place), image[place + 4 : place + 8]
        end = place + 8 + length
        if image[end : end + 4] != struct.pack(">I", zlib.crc32(memoryview(image)[place + 4 : end])):
            raise RewardError(f"the pictures cannot be read: picture {number} is damaged at byte {place}")
        if kind[:1].isupper() and kind not in CRITICAL_CHUNKS:
            raise RewardError(f"the pictures cannot be read: picture {number} has a chunk {kind!r} of no known kind")
        place = end + 4


def unpack_result(answer: Answer) -> RewardResult:
    """Scores and details of an answer; null is NaN."""
    scores = [np.nan if score is None else score for score in answer.scores]
    raised = tuple(tuple(together) for together in answer.raised)
    return RewardResult(np.array(scores, dtype=np.float64), dict(answer.details), raised=raised)
