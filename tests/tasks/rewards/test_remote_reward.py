# SPDX-License-Identifier: Apache-2.0
"""The HTTP scorer: a real server process and its client, and servers that are not what the client expects."""

import io
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
import typer
import uvicorn
from fastapi.testclient import TestClient
from PIL import Image
from typer.testing import CliRunner

from tasks.actors.reward_worker import RewardWorker
from tasks.cli.terminal import command_of
from tasks.config.reward import RewardFunctionConfig
from tasks.data.prompts import Prompt
from tasks.rewards import Reward, RewardError, RewardResult, get_reward
from tasks.rewards.base import FunctionReward
from tasks.rewards.remote import RemoteFailure, pack_images, pack_request, pack_tensor
from tasks.rewards.scored_prompt import ScoredPrompt
from tasks.rewards.serve import Limits, listening_socket, main, make_app, version_with
from tests.support.patience import PATIENCE, wait_until

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[3]
RNG = np.random.default_rng(0)
CLIENT = httpx.Client()
"""For many requests: each by itself would read the machine's certificates."""
IMAGES = RNG.integers(0, 256, (5, 24, 32, 3), dtype=np.uint8)


def prompts_of(count: int = 5) -> list[Prompt]:
    return [Prompt(f"uid-{i}", f"picture {i}", f"target {i}", {"level": i}, "") for i in range(count)]


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """`python -m tasks.rewards.serve --port 0 ...` during the block; its address."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tasks.rewards.serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is served at http://" in line, f"the server ended with {process.poll()}: {line}"
        yield line.rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--reward", "nope"), "error: there is no reward 'nope'; known are "),
        (("--reward", "ocr", "--option", "detekt=1"), "unexpected keyword argument 'detekt'"),
        (("--reward", "ocr", "--option", "upscale=["), "upscale: the value '[' is not YAML: "),
        (
            ("--reward", "brightness", "--host", "192.0.2.1"),
            "error: --host 192.0.2.1 and --port 8100 cannot be served (",
        ),
    ],
)
def test_a_server_that_cannot_start_says_why_in_a_sentence(arguments: tuple[str, ...], complaint: str) -> None:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert complaint in " ".join(done.output.replace("│", " ").split())


@contextmanager
def answering(*answers: tuple[int, dict]) -> Iterator[str]:
    """A server that gives these answers (status, body) to successive requests, the last one for ever."""
    remaining = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def hosting(reward: Reward, limits: Limits) -> Iterator[str]:
    """A server of this process's reward during the block; its address."""
    listening = listening_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(reward, limits), log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server's start", every=0.02)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


@contextmanager
def leaving(posts: list[bytes], silent: threading.Event | None = None) -> Iterator[str]:
    """A server that notes each POST; it is then silent until the event, or closes the connection of the first one
    without an answer."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.send(HOSTED | {"protocol": 1})

        def do_POST(self):
            posts.append(self.rfile.read(int(self.headers["Content-Length"])))
            if silent is not None:
                silent.wait(PATIENCE)
            elif len(posts) > 1:
                self.send(GOOD)

        def send(self, body):
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        if silent is not None:
            silent.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def jpeg() -> Iterator[str]:
    with served("--reward", "jpeg_incompressibility") as address:
        yield address


@pytest.mark.parametrize("encoding", ["tensor", "png"])
def test_a_hosted_reward_scores_as_it_does_at_home(jpeg: str, encoding: str) -> None:
    local = get_reward("jpeg_incompressibility")
    remote = get_reward("remote", url=jpeg, encoding=encoding)
    assert remote.version == f"jpeg_incompressibility {local.version}"
    for _ in range(2):
        assert np.array_equal(remote(IMAGES, prompts_of()).scores, local(IMAGES, prompts_of()).scores)


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_cannot_be_is_refused_before_the_reward_is_loaded(port: str) -> None:
    ended = CliRunner().invoke(command_of(main), ["--reward", "no_reward", "--port", port], env={"COLUMNS": "200"})
    assert (ended.exit_code, "'--port': Input should be " in ended.output) == (2, True), ended.output


def test_answers_leave_at_once() -> None:
    """All of one, also where a client keeps its connection: the option is that of each connection."""
    with listening_socket("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_documented_request_works_with_any_client(jpeg: str) -> None:
    """As in docs/rewards.md, without this project's client."""
    from safetensors.numpy import save

    assert httpx.get(f"{jpeg}/v1/reward").json()["name"] == "jpeg_incompressibility"
    request = json.dumps({"protocol": 1, "prompts": [{"prompt": "a cat", "target": None, "metadata": {}}]})
    files = {"request": ("request.json", request), "tensor": ("batch.safetensors", save({"batch": IMAGES[:1]}))}
    body = httpx.post(f"{jpeg}/v1/score", files=files).json()
    assert set(body) == {"protocol", "version", "scores", "details"}
    assert body["scores"] == [pytest.approx(get_reward("jpeg_incompressibility")(IMAGES[:1], prompts_of(1)).scores[0])]


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"request": b'{"protocol": 2, "prompts": []}'}, "the client speaks reward protocol 2, this server 1"),
        ({"request": b"no json"}, "the part `request` is not as the protocol says"),
        ({"request": b'{"protocol": 1, "prompts": [{"colour": 1}]}'}, "unexpected keyword argument 'colour'"),
        ({"request": pack_request(prompts_of(1))}, "give either one part `tensor` or one part `images`"),
        ({"request": pack_request(prompts_of(1)), "tensor": b"\x80\x04pickle"}, "the pictures cannot be read"),
        ({"request": pack_request(prompts_of(1)), "images": b"no png"}, "the pictures cannot be read"),
        (
            {"request": pack_request(prompts_of(3)), "tensor": pack_tensor(IMAGES)[1][1]},
            "5 images came with 3 prompts",
        ),
    ],
)
def test_a_bad_request_is_refused_with_a_sentence(jpeg: str, parts: dict, complaint: str) -> None:
    response = CLIENT.post(f"{jpeg}/v1/score", files={name: (name, content) for name, content in parts.items()})
    assert response.status_code == 400
    assert complaint in response.json()["error"]


def test_details_nan_errors_and_latents_pass_through() -> None:
    """A user's own reward, hosted by import path with an option."""
    with served("--reward", "tests.support.hosted_reward:peculiar", "--option", "scale=2.0") as address:
        remote = get_reward("remote_latents", url=address)
        here = get_reward("tests.support.hosted_reward:peculiar").version
        assert remote.version == f"tests.support.hosted_reward:peculiar {version_with(here, {'scale': 2.0})}"
        latents = np.zeros((3, 4, 2), np.float32)
        latents[1] = np.nan
        latents[2] = 1.5
        result = remote(latents, prompts_of(3))
        assert np.array_equal(result.scores, np.array([0, np.nan, 3], np.float32), equal_nan=True)
        told = {"target": ["target 0", "target 1", "target 2"], "level": [0, None, 2]}
        assert result.details == told | {"error": [None, "the reward itself returned nan", None]}
        with pytest.raises(RewardError, match=r"the server at .* refuses: peculiar: no prompt says anything"):
            remote(latents[:1], [Prompt("u", "", None, {}, "")])
        with pytest.raises(RemoteFailure, match="answered 500: ZeroDivisionError: division by zero"):
            remote(latents[:1], [Prompt("u", "divide", None, {}, "")])
        with pytest.raises(
            RewardError, match=r"hosts tests\.support\.hosted_reward:peculiar, which wants latents: use remote_latents"
        ):
            get_reward("remote", url=address)


def test_other_options_are_another_version_in_whatever_order_they_are_given() -> None:
    nested = {"a": {"x": 1, 2: [3]}, "b": None}
    served_with: list[dict[str, Any]] = [{}, {"divide_by": 26}, {"divide_by": 26.5}, {"detect": True}, nested]
    assert len({version_with("1", options) for options in served_with}) == len(served_with)
    assert version_with("1", {}) == "1"
    assert version_with("1", nested) == version_with("1", {"b": None, "a": {2: [3], "x": 1}})


def test_a_source_of_a_server_that_raised_is_asked_again_by_the_worker(tmp_path: Path) -> None:
    flaky = f"tests.support.unreliable_rewards:fails_before, options: {{folder: {tmp_path}, attempts: 1}}"
    sources = f"sources={{good: brightness, flaky: {{reward: {flaky}}}}}"
    with served("--reward", "by_data_source", "--option", sources) as address:
        settings = RewardFunctionConfig(options={"url": address}, retries=1, retry_wait_s=0)
        prompts: list[ScoredPrompt] = [
            Prompt("u", "", None, {"data_source": of}, "") for of in ("good", "flaky", "good")
        ]
        found = RewardWorker("remote", settings).score(
            0, prompts, np.full((3, 4, 6, 3), 255, np.uint8), np.ones(3, bool)
        )
        assert isinstance(found, RewardResult)
        assert found.scores.tolist() == [1, 255, 1]
        assert found.details["error"] == [None] * 3


HOSTED = {"name": "x", "version": "1", "wants": "images"}
GOOD: dict[str, Any] = {"protocol": 1, "version": "1", "scores": [0.5] * 5, "details": {}}


def test_another_protocol_is_one_clear_error() -> None:
    other = [((200, HOSTED | {"protocol": 2}), "speaks reward protocol 2, this client 1: install the same version")]
    other += [((404, {"detail": "Not Found"}), "has no /v1/reward: it is no reward server, or speaks another protocol")]
    for answer, complaint in other:
        with answering(answer) as address, pytest.raises(RewardError, match=complaint):
            get_reward("remote", url=address)
    with pytest.raises(RewardError, match=r"remote: no reward server answers at http://127\.0\.0\.1:9:"):
        get_reward("remote", url="http://127.0.0.1:9", max_retries=0)


def test_a_busy_or_restarting_server_is_asked_again() -> None:
    busy = [(503, {"error": "starting"}), (429, {"error": "busy"})]
    with answering((200, HOSTED | {"protocol": 1}), *busy, (200, GOOD)) as address:
        assert get_reward("remote", url=address)(IMAGES, prompts_of()).scores.tolist() == [0.5] * 5
    with answering((200, HOSTED | {"protocol": 1}), (503, {"error": "starting"})) as address:
        remote = get_reward("remote", url=address, max_retries=2)
        with pytest.raises(RemoteFailure, match="answered 503: starting"):
            remote(IMAGES, prompts_of())


def test_a_batch_that_a_server_is_still_at_is_not_sent_again() -> None:
    posts: list[bytes] = []
    with leaving(posts, threading.Event()) as address:
        remote = get_reward("remote", url=address, timeout_s=2, max_retries=1)
        with pytest.raises(RemoteFailure, match=r"no answer within timeout_s 2 and was still at the 5 samples"):
            remote(IMAGES, prompts_of())
        assert len(posts) == 1


def test_a_batch_whose_connection_is_lost_is_sent_again() -> None:
    posts: list[bytes] = []
    with leaving(posts) as address:
        assert get_reward("remote", url=address, max_retries=1)(IMAGES, prompts_of()).scores.tolist() == [0.5] * 5
    assert len(posts) == 2


def test_a_batch_whose_client_has_gone_is_not_scored_when_its_turn_comes() -> None:
    seen: list[str] = []
    begun, released = threading.Event(), threading.Event()

    def patient(images: Any, prompts: Any) -> np.ndarray:
        seen.append(prompts[0].prompt)
        begun.set()
        assert released.wait(PATIENCE)
        return np.zeros(len(images))

    def scored(address: str, prompt: str, timeout: float) -> int:
        request = pack_request([Prompt("u", prompt, None, {}, "")])
        files = [("request", ("request.json", request, "application/json")), pack_tensor(IMAGES[:1])]
        return httpx.post(f"{address}/v1/score", files=files, timeout=timeout).status_code

    with hosting(FunctionReward("patient", patient, {}), Limits()) as address:
        first = threading.Thread(target=scored, args=(address, "first", PATIENCE))
        first.start()
        assert begun.wait(PATIENCE)
        with pytest.raises(httpx.ReadTimeout):
            scored(address, "gone", 1)
        assert httpx.get(f"{address}/v1/reward", timeout=PATIENCE).is_success  # by now it has heard of that end
        released.set()
        first.join(PATIENCE)
        assert scored(address, "last", PATIENCE) == 200
    assert seen == ["first", "last"]


class Told(Reward):
    """Mean of a picture's channels; the dark ones failed together, and a batch with them alone tells of it."""

    name, version = "told", "1"

    def score(self, batch: np.ndarray, prompts: object) -> RewardResult:
        levels = batch.reshape(len(batch), -1).mean(1)
        dark = np.flatnonzero(levels == 0)
        details: dict[str, list] = {"level": levels.tolist()}
        if len(dark):
            details |= {"error": [None if level else "dark" for level in levels]}
        scores = np.where(levels == 0, np.nan, levels)
        return RewardResult(scores, details, raised=(tuple(dark.tolist()),) if len(dark) else ())


@pytest.mark.parametrize(
    ("encoding", "limits", "most"),
    [
        ("tensor", Limits(max_request_mb=0.01), 3),
        ("tensor", Limits(max_pictures=1), 9),
        ("png", Limits(max_request_mb=0.01), 3),
        ("png", Limits(max_pictures=2), 2),
        ("png", Limits(), 9),
    ],
)
def test_a_batch_beyond_a_servers_limits_is_sent_in_parts(
    encoding: Literal["tensor", "png"], limits: Limits, most: int
) -> None:
    """Scores, details and what failed are those of the whole; pictures have 2304 bytes, noise that no PNG makes less
    of, or none at all."""
    pictures = np.concatenate([IMAGES, IMAGES[:4]])
    pictures[[1, 7]] = 0
    sizes: list[int] = []

    class Counted(Told):
        def score(self, batch: np.ndarray, prompts: object) -> RewardResult:
            sizes.append(len(batch))
            return super().score(batch, prompts)

    here = Told()(pictures, prompts_of(9))
    of_videos = Told()(pictures.reshape(3, 3, 24, 32, 3), prompts_of(3))
    with hosting(Counted(), limits) as address:
        found = get_reward("remote", url=address, encoding=encoding)(pictures, prompts_of(9))
        videos = get_reward("remote", url=address, encoding=encoding)(pictures.reshape(3, 3, 24, 32, 3), prompts_of(3))
    assert max(sizes) == most
    assert np.array_equal(found.scores, here.scores, equal_nan=True)
    assert found.details == here.details
    assert sorted(index for together in found.raised for index in together) == [1, 7]
    assert np.array_equal(videos.scores, of_videos.scores, equal_nan=True)
    assert videos.details == of_videos.details


def test_frames_of_a_rollout_are_more_pictures_than_a_server_takes_at_once_without_a_setting() -> None:
    videos = np.full((40, 26, 2, 2, 3), 255, np.uint8)
    with hosting(get_reward("brightness"), Limits()) as address:
        found = get_reward("remote", url=address, encoding="png")(videos, prompts_of(40))
    assert found.scores.tolist() == [1] * 40


def test_a_server_that_does_not_tell_its_limits_has_the_usual_ones() -> None:
    batch = np.zeros((1001, 2, 2, 3), np.uint8)
    parts = [GOOD | {"scores": [float(number)] * size, "raised": [[0]]} for number, size in enumerate((1000, 1))]
    with answering((200, HOSTED | {"protocol": 1}), *((200, part) for part in parts)) as address:
        found = get_reward("remote", url=address, encoding="png")(batch, prompts_of(1001))
    assert found.scores.tolist() == [0.0] * 1000 + [1.0]
    assert found.raised == ((0,), (1000,))


def test_what_a_server_says_that_is_not_finite_is_missing() -> None:
    """Python's JSON has Infinity, and any JSON has numbers that float32 cannot hold."""
    odd = GOOD | {"scores": [0.5, float("inf"), 1e300, None, 0.25]}
    with answering((200, HOSTED | {"protocol": 1}), (200, odd)) as address:
        result = get_reward("remote", url=address)(IMAGES, prompts_of())
    assert np.isnan(result.scores).tolist() == [False, True, True, True, False]
    said = [f"the reward itself returned {value}" for value in ("inf", "1e+300", "nan")]
    assert result.details["error"] == [None, *said, None]


def test_another_version_in_the_middle_of_a_run_is_an_error() -> None:
    with answering((200, HOSTED | {"protocol": 1}), (200, GOOD), (200, GOOD | {"version": "2"})) as address:
        remote = get_reward("remote", url=address)
        remote(IMAGES, prompts_of())
        with pytest.raises(RewardError, match="now hosts version '2' in place of '1'"):
            remote(IMAGES, prompts_of())


def png(width: int, height: int, body: bytes = b"", again: bytes = b"") -> bytes:
    """A 1-bit PNG of that size by its header; `again` is a second header."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + (chunk(b"IHDR", again) if again else b"")
    return b"\x89PNG\r\n\x1a\n" + parts + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def saved(form: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(buffer, format=form)
    return buffer.getvalue()


BOMB = png(13000, 13000, b"\x00" * (13000 // 8 + 1) * 13000)


@pytest.mark.parametrize(
    ("limits", "images", "status", "complaint"),
    [
        (Limits(), [BOMB], 413, "picture 0 has 13000 x 13000 pixels, and at most 16777216 are taken"),
        (Limits(), [png(20000, 20000)], 413, "picture 0 has 20000 x 20000 pixels"),
        (Limits(max_pixels=700), [saved("PNG")], 413, "32 x 24 pixels, and at most 700"),
        (Limits(), [png(4096, 4096)] * 30, 413, "30 pictures of 4096 x 4096 pixels take more than 1024 MB unpacked"),
        (Limits(max_request_mb=0.001), [saved("PNG")], 413, "the request is larger than 0.001 MB"),
        (Limits(max_request_mb=0.001), [saved("PNG")], 413, "or start the server with a larger --max-request-mb"),
        (Limits(max_pictures=2), [saved("PNG")] * 3, 400, "3 parts `images`, and at most 2 are taken"),
        (Limits(max_pictures=2), [saved("PNG")] * 3, 400, "or start the server with a larger --max-pictures"),
        (Limits(max_pictures=2), [saved("PNG")] * 9, 400, "more than 4 parts `images`, and at most 2 are taken"),
        (Limits(max_pictures=2), [saved("PNG")] * 9, 400, "or start the server with a larger --max-pictures"),
        (Limits(), [png(8, 8, again=struct.pack(">IIBBBBB", 13000, 13000, 1, 0, 0, 0, 0))], 400, "cannot be read"),
        (Limits(), [png(8, 0)], 400, "picture 0 has 8 x 0 pixels"),
        (Limits(), [png(8, 8)], 400, "the pictures cannot be read: picture 0"),
        (Limits(), [png(8, 8), png(9, 8)], 400, "they must be of one size"),
        *((Limits(), [saved(form)], 400, "picture 0 is no PNG") for form in ("GIF", "TIFF", "TGA", "JPEG", "EPS")),
    ],
)
def test_pictures_that_are_too_large_or_no_png_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, images: list[bytes], status: int, complaint: str
) -> None:
    loaded: list[tuple] = []
    load = Image.Image.load
    monkeypatch.setattr(Image.Image, "load", lambda image: loaded.append(image.size) or load(image))
    client = TestClient(make_app(get_reward("brightness"), limits), raise_server_exceptions=False)
    files = [("request", ("r", pack_request(prompts_of(len(images)))))]
    response = client.post("/v1/score", files=[*files, *(("images", (f"{i}", x)) for i, x in enumerate(images))])
    assert (response.status_code, set(response.json())) == (status, {"protocol", "error"})
    assert complaint in response.json()["error"]
    assert not [size for size in loaded if size[0] * size[1] > 1000]


def test_a_sample_that_is_too_large_is_one_sentence_for_the_client() -> None:
    with served("--reward", "brightness", "--max-request-mb", "0.005") as address:
        remote = get_reward("remote", url=address)
        assert len(remote(IMAGES, prompts_of()).scores) == 5
        with pytest.raises(RewardError, match=r"refuses: the request is larger than 0\.005 MB.* --max-request-mb$"):
            remote(np.repeat(IMAGES, 300, axis=1), prompts_of())


def test_details_that_json_has_no_number_for_are_null() -> None:
    def endless(images, prompts):
        return RewardResult(np.zeros(len(images)), {"d": [np.inf] * len(images)})

    client = TestClient(make_app(FunctionReward("endless", endless, {})), raise_server_exceptions=False)
    files = [("request", ("r", pack_request(prompts_of()))), *pack_images(IMAGES)]
    assert client.post("/v1/score", files=files).json()["details"] == {"d": [None] * 5}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({key: value for key, value in GOOD.items() if key != "scores"}, "scores"),
        ({key: value for key, value in GOOD.items() if key != "version"}, "version"),
        ({key: value for key, value in GOOD.items() if key != "details"}, "details"),
        (GOOD | {"scores": 5}, "scores"),
        (GOOD | {"scores": ["0.5"] * 5}, "scores"),
        (GOOD | {"scores": [[0.5]] * 5}, "scores"),
        (GOOD | {"scores": [True] * 5}, "scores"),
        (GOOD | {"scores": [10**400] * 5}, "scores"),
        (GOOD | {"scores": [0.5] * 4}, "scores"),
        (GOOD | {"details": None}, "details"),
        (GOOD | {"details": {"text": 3}}, "text"),
        (GOOD | {"details": {"text": ["x"]}}, "text"),
        (GOOD | {"version": 1}, "version"),
        (GOOD | {"raised": [[4], [5]]}, "raised names samples beyond its scores"),
        ([GOOD], "with JSON that is no object"),
        ("good", "with JSON that is no object"),
        (None, "with JSON that is no object"),
    ],
)
def test_an_answer_that_is_not_as_the_protocol_says_is_a_failure_in_one_sentence(answer: object, said: str) -> None:
    with answering((200, HOSTED | {"protocol": 1}), (200, answer)) as address:
        remote = get_reward("remote", url=address)
        with pytest.raises(RemoteFailure, match=rf"^http://127\S+ answered [^\n]*{said}[^\n]*$"):
            remote(IMAGES, prompts_of())


def test_a_server_that_says_half_of_what_it_hosts_is_a_failure() -> None:
    complaint = "answered not as the protocol says: version: Field required"
    with answering((200, {"protocol": 1, "name": "x"})) as address, pytest.raises(RemoteFailure, match=complaint):
        get_reward("remote", url=address)
