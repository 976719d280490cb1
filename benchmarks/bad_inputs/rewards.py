# SPDX-License-Identifier: Apache-2.0
"""Requests to a reward server, and answers to the client: both over HTTP on this machine."""

import atexit
import functools
import io
import json
import math
import struct
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import uvicorn
from PIL import Image

from benchmarks.bad_inputs.cases import Case, damaged, draws
from models.errors import DoubleflowError
from tasks.data.prompts import Prompt
from tasks.rewards import RewardResult, get_reward
from tasks.rewards.serve import Limits, listening_socket, make_app

SERVER = "reward server: requests"
CLIENT = "reward client: answers"
RNG = np.random.default_rng(0)
BATCH = RNG.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
LIMITS = Limits(max_pixels=64 * 64, max_request_mb=0.2, max_pictures=4)


class Refused(DoubleflowError, ValueError):
    """The server's answer of a status of 400 or above that says why."""


@functools.cache
def server() -> str:
    """Address of the server of this process."""
    config = uvicorn.Config(make_app(get_reward("jpeg_incompressibility"), LIMITS), log_level="critical")
    listening = listening_socket("127.0.0.1", 0)
    running = uvicorn.Server(config)
    threading.Thread(target=running.run, args=([listening],), daemon=True).start()
    while not running.started:
        time.sleep(0.01)
    atexit.register(setattr, running, "should_exit", True)
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


Part = tuple[str, tuple[str | None, bytes, str]]


def request_part(content: bytes) -> Part:
    """The part `request`."""
    return "request", ("request.json", content, "application/json")


def body(prompts: Any = None, **other: Any) -> bytes:
    """A request's JSON."""
    rows = [{"prompt": "a", "target": None, "metadata": {}}, {"prompt": "b", "target": "t", "metadata": {"x": 1}}]
    return json.dumps({"protocol": 1, "prompts": rows if prompts is None else prompts} | other).encode()


def tensor(content: bytes) -> Part:
    """The part `tensor`."""
    return "tensor", ("batch.safetensors", content, "application/octet-stream")


def image(content: bytes) -> Part:
    """A part `images`."""
    return "images", ("0.png", content, "image/png")


def safetensors(
    dtype: str = "U8", shape: Any = (2, 8, 8, 3), data: bytes | None = None, name: str = "batch", **header: Any
) -> bytes:
    """A file by hand, so that its header may say anything."""
    data = BATCH.tobytes() if data is None else data
    text = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]} | header}).encode()
    return struct.pack("<Q", len(text)) + text + data


def png(picture: np.ndarray | None = None, form: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    stream = io.BytesIO()
    Image.fromarray(BATCH[0] if picture is None else picture).save(stream, format=form, **options)
    return stream.getvalue()


def chunks(*parts: tuple[bytes, bytes]) -> bytes:
    """A PNG out of chunks with right checksums."""
    made = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


def _ihdr(width: int, height: int, depth: int = 8, colour: int = 2, last: bytes = b"\0\0\0") -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBB", width, height, depth, colour) + last


GOOD_ROW = {"prompt": "a", "target": None, "metadata": {}}
BODIES: tuple[bytes, ...] = (
    *(
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"protocol": 1}',
        body(protocol=2),
        body(protocol="1"),
    ),
    *(
        body(protocol=None),
        body(protocol=True),
        body(protocol=[1]),
        body([]),
        body([GOOD_ROW]),
        body([GOOD_ROW] * 3),
        body("ab"),
        body({}),
    ),
    *(body([1, 2]), body([None, None]), body([[], []]), body([GOOD_ROW, {}]), body([GOOD_ROW, {"prompt": 1}]), body(5)),
    *(body([GOOD_ROW, {"prompt": "a", "target": 5}]), body([GOOD_ROW, {"prompt": "a", "metadata": None}])),
    *(body([GOOD_ROW, {"prompt": "a", "metadata": [1]}]), body([GOOD_ROW, {"prompt": "a", "colour": 1}])),
    *(
        body([GOOD_ROW, {"prompt": "\ud800"}]),
        body([GOOD_ROW, {"prompt": "\0"}]),
        body([GOOD_ROW, {"prompt": ""}]),
        body() + body(),
    ),
    *(
        b'{"protocol": 1, "protocol": 2, "prompts": []}',
        b'{"protocol": 1, "prompts": [{"prompt": "a", "metadata": {"x": NaN}}, {"prompt": "b"}]}',
    ),
    *(b'{"protocol": 1, "prompts": ' + b"9" * 5000 + b"}", body().decode().encode("utf-16"), b"\xef\xbb\xbf" + body()),
    *(body([GOOD_ROW, {"prompt": ["a"]}]), body([GOOD_ROW, {"prompt": True}]), body(more=1)),
)
TENSORS: tuple[bytes, ...] = (
    *(
        b"",
        b"\x80\x04pickle",
        b"\0" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        safetensors(name="other"),
    ),
    *(
        safetensors(kind, data=BATCH.tobytes() * size)
        for kind, size in (("F32", 4), ("F64", 8), ("I8", 1), ("BF16", 2), ("F16", 2))
    ),
    *(
        safetensors(kind, data=BATCH.tobytes() * size)
        for kind, size in (("BOOL", 1), ("I64", 8), ("F8_E4M3", 1), ("X9", 1), ("U16", 2))
    ),
    *(
        safetensors(shape=shape)
        for shape in ((2, 8, 8, 4), (2, 192), (384,), (2, 8, 24), (1, 2, 8, 8, 3), (0, 8, 8, 3), (2, 2**40, 8, 3))
    ),
    *(
        safetensors(shape=shape)
        for shape in ((2, -8, 8, 3), (2.0, 8, 8, 3), "x", None, (4, 8, 4, 3), (3, 8, 8, 3), (1, 16, 8, 3))
    ),
    *(
        safetensors(shape=(2, 8, 0, 3), data=b""),
        safetensors(shape=(2, 0, 8, 3), data=b""),
        safetensors(data_offsets=[0, 10**12]),
    ),
    *(
        safetensors(data_offsets=[-1, 5]),
        safetensors(data_offsets=[5, 0]),
        safetensors()[:-1],
        safetensors() + b"x",
        safetensors(shape=(2, 1, 8, 3), data=BATCH[:, :1].tobytes()),
    ),
    *(
        safetensors() + bytes(300_000),
        safetensors(shape=(2, 200, 200, 3), data=bytes(240_000)),
        safetensors(shape=(4096, 4096, 0, 3), data=b""),
    ),
)
IDAT = zlib.compress(b"".join(b"\0" + row.tobytes() for row in BATCH[0]))
IMAGES: tuple[bytes, ...] = (
    *(
        b"",
        b"no png",
        png(form="GIF"),
        png(form="JPEG"),
        png(form="BMP"),
        png(form="TIFF"),
        png(form="WEBP"),
        png(form="TGA"),
        png(form="PPM"),
    ),
    *(
        png(form="ICO"),
        png(form="JPEG2000"),
        png(form="EPS"),
        png(form="PDF"),
        png()[:-20],
        png() + b"more",
        png()[:33],
        png()[8:],
    ),
    *(chunks(_ihdr(0, 8), (b"IDAT", IDAT), (b"IEND", b"")), chunks(_ihdr(8, 0), (b"IDAT", IDAT), (b"IEND", b""))),
    *(
        chunks(_ihdr(2**31 - 1, 2**31 - 1), (b"IDAT", IDAT), (b"IEND", b"")),
        chunks(_ihdr(13000, 13000, 1, 0), (b"IDAT", zlib.compress(bytes(13000 * 1626))), (b"IEND", b"")),
    ),
    *(
        chunks(_ihdr(8, 8, 7), (b"IDAT", IDAT), (b"IEND", b"")),
        chunks(_ihdr(8, 8, 8, 5), (b"IDAT", IDAT), (b"IEND", b"")),
    ),
    *(
        chunks(_ihdr(8, 8), (b"IEND", b"")),
        chunks(_ihdr(8, 8), (b"IDAT", b"x"), (b"IEND", b"")),
        chunks(_ihdr(8, 8), (b"IDAT", IDAT[:-9]), (b"IEND", b"")),
    ),
    *(
        chunks(_ihdr(8, 8), _ihdr(4, 4), (b"IDAT", IDAT), (b"IEND", b"")),
        chunks((b"tEXt", b"a\0b"), _ihdr(8, 8), (b"IDAT", IDAT), (b"IEND", b"")),
    ),
    *(
        chunks(_ihdr(8, 8), (b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(10**7))), (b"IDAT", IDAT), (b"IEND", b"")),
        chunks(_ihdr(8, 8), (b"zTXt", b"a\0\0" + zlib.compress(bytes(10**7))), (b"IDAT", IDAT), (b"IEND", b"")),
    ),
    *(
        chunks(_ihdr(8, 8, 8, 3), (b"PLTE", b"\0\0\0"), (b"IDAT", zlib.compress(bytes(72))), (b"IEND", b"")),
        chunks(_ihdr(8, 8, 8, 3), (b"IDAT", zlib.compress(bytes(72))), (b"IEND", b"")),
    ),
    *(
        chunks(_ihdr(8, 8), (b"XXXX", b"critical"), (b"IDAT", IDAT), (b"IEND", b"")),
        chunks(_ihdr(8, 8), (b"IDAT", zlib.compress(bytes(10**8))), (b"IEND", b"")),
    ),
    *(
        png(np.zeros((8, 8), np.uint8)),
        png(np.zeros((8, 8, 4), np.uint8)),
        png(np.zeros((65, 65, 3), np.uint8)),
        png(np.zeros((9, 8, 3), np.uint8)),
    ),
    chunks(_ihdr(8, 8, 8, 2, b"\0\0\2"), (b"IDAT", IDAT), (b"IEND", b"")),
)


def requests(seed: int) -> list[Case]:
    """Bodies, tensors and pictures, chosen and damaged, and requests that are no forms."""
    good = tensor(safetensors())
    cases = [_parts_case(f"body {content[:40]!r}", [request_part(content), good]) for content in BODIES]
    cases += [_parts_case(f"tensor {content[:90]!r}", [request_part(body()), tensor(content)]) for content in TENSORS]
    cases += [
        _parts_case(f"picture {number} {content[:40]!r}", [request_part(body()), image(png()), image(content)])
        for number, content in enumerate(IMAGES)
    ]
    cases += [_parts_case(name, parts) for name, parts in FORMS]
    cases += [_raw_case(name, *raw) for name, raw in RAW]
    for number in range(84):
        rng = draws(SERVER, number, seed)
        which = number % 3
        what, changed = damaged((body(), safetensors(), png(BATCH[1]))[which], rng)
        parts = (
            [request_part(changed), good],
            [request_part(body()), tensor(changed)],
            [request_part(body()), image(png()), image(changed)],
        )[which]
        cases.append(_parts_case(f"#{number} {('body', 'tensor', 'picture')[which]} {what}", parts))
    return cases


FORMS: tuple[tuple[str, list[Part]], ...] = (
    ("no request", [tensor(safetensors())]),
    ("neither", [request_part(body())]),
    ("both", [request_part(body()), tensor(safetensors()), image(png())]),
    ("two tensors", [request_part(body()), tensor(safetensors()), tensor(safetensors())]),
    ("two requests", [request_part(body()), request_part(body([])), tensor(safetensors())]),
    ("too many pictures", [request_part(body()), *[image(png())] * 5]),
    ("many pictures", [request_part(body()), *[image(png())] * 50]),
    ("a picture less", [request_part(body()), image(png())]),
    ("a tensor without a file's name", [request_part(body()), ("tensor", (None, safetensors(), "text/plain"))]),
    ("a picture without a file's name", [request_part(body()), ("images", (None, b"x", "text/plain")), image(png())]),
    ("a part more", [request_part(body()), tensor(safetensors()), ("other", ("o", b"x", "text/plain"))]),
    ("many parts", [request_part(body()), tensor(safetensors()), *[("other", (None, b"x", "text/plain"))] * 20]),
    ("good", [request_part(body()), tensor(safetensors())]),
    ("good pictures", [request_part(body()), image(png()), image(png())]),
)
FORM = "multipart/form-data; boundary=x"
FIELD = b'Content-Disposition: form-data; name="request"'
URL_ENCODED = "application/x-www-form-urlencoded"
POSTED: tuple[tuple[str, str, bytes], ...] = (
    ("no form", "application/json", b"{}"),
    ("no boundary", "multipart/form-data", b"x"),
    ("another boundary", FORM, b"--y\r\n\r\n--y--"),
    ("an empty form", FORM, b""),
    ("a form cut off", FORM, b"--x\r\n" + FIELD + b"\r\n\r\n{"),
    ("a part without a name", FORM, b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--\r\n"),
    ("a charset that is none", f"{FORM}; charset=no", b"--x\r\n" + FIELD + b"\r\n\r\n1\r\n--x--\r\n"),
    ("bytes that are no text", FORM, b"--x\r\n" + FIELD + b"\r\n\r\n\xff\xfe\r\n--x--\r\n"),
    ("a name that is no text", FORM, b"--x\r\n" + FIELD.replace(b"request", b"\xff") + b"\r\n\r\n1\r\n--x--\r\n"),
    ("url-encoded", URL_ENCODED, b"request=%7B%7D&tensor=x"),
    ("url-encoded without end", URL_ENCODED, b"%zz=%"),
    ("too large", FORM, bytes(300_000)),
)
RAW: tuple[tuple[str, tuple[str, str, dict[str, str], bytes]], ...] = (
    *((name, ("POST", "/v1/score", {"Content-Type": kind}, content)) for name, kind, content in POSTED),
    ("GET", ("GET", "/v1/score", {}, b"")),
    ("DELETE", ("DELETE", "/v1/reward", {}, b"")),
    ("another path", ("GET", "/v2/score", {}, b"")),
    ("a path upwards", ("GET", "/../../etc/passwd", {}, b"")),
    ("a long path", ("GET", "/" + "a" * 5000, {}, b"")),
    ("a long header", ("GET", "/v1/reward", {"X": "a" * 50_000}, b"")),
)


@functools.cache
def client() -> httpx.Client:
    """One for all requests: each of its own would read the certificates of the machine."""
    return httpx.Client()


def _parts_case(name: str, parts: list[Part]) -> Case:
    def act(folder: Path) -> dict[str, Any]:
        return _answer(client().post(f"{server()}/v1/score", files=parts, timeout=60))

    return Case(SERVER, name, _nothing, act, lambda answer: _fault_of_answer(answer, parts))


def _raw_case(name: str, method: str, path: str, headers: dict[str, str], content: bytes) -> Case:
    def act(folder: Path) -> dict[str, Any]:
        return _answer(client().request(method, f"{server()}{path}", headers=headers, content=content, timeout=60))

    asked = (method, path) == ("GET", "/v1/reward")
    return Case(SERVER, name, _nothing, act, lambda answer: None if asked else f"answered {answer}")


def _nothing(folder: Path) -> None:
    """No files."""


def _answer(response: httpx.Response) -> dict[str, Any]:
    """A good answer, after which the server still answers. Raises Refused for a refusal; anything else is a defect."""
    client().get(f"{server()}/v1/reward", timeout=60).raise_for_status()
    if response.is_success:
        return response.json()
    said = response.json()["error"] if "json" in response.headers.get("content-type", "") else response.text
    if 400 <= response.status_code < 500:
        raise Refused(said)
    raise AssertionError(f"{response.status_code}: {said}")


def _fault_of_answer(answer: dict[str, Any], parts: list[Part]) -> str | None:
    """The oracle: the request was one by the protocol, and each score is that of the picture it holds."""
    try:
        request = json.loads(next(content for name, (_, content, _) in parts if name == "request"))
        pictures = [_decoded(content) for name, (_, content, _) in parts if name == "images"]
        tensors = [_of_safetensors(content) for name, (_, content, _) in parts if name == "tensor"]
    except (ValueError, KeyError, TypeError) as error:
        return f"the request is none: {error}"
    if request["protocol"] != 1 or isinstance(request["protocol"], bool):
        return "another protocol"
    if len(tensors) + (1 if pictures else 0) != 1:
        return "not one batch"
    batch = tensors[0] if tensors else np.stack(pictures)
    rows = request["prompts"]
    if not all(isinstance(row["prompt"], str) and isinstance(row.get("metadata", {}), dict) for row in rows):
        return "prompts that are none"
    if len(rows) != len(batch) or batch.dtype != np.uint8 or batch.shape[-1] != 3:
        return f"{len(rows)} prompts for {batch.dtype} {batch.shape}"
    wanted = get_reward("jpeg_incompressibility")(batch, [Prompt("", "a", None, {}, "")] * len(rows)).scores
    return None if np.allclose(answer["scores"], wanted) else f"scores {answer['scores']} and not {wanted}"


def _of_safetensors(content: bytes) -> np.ndarray:
    (length,) = struct.unpack("<Q", content[:8])
    entry = json.loads(content[8 : 8 + length])["batch"]
    if entry["dtype"] != "U8":
        raise ValueError(entry["dtype"])
    first, last = entry["data_offsets"]
    return np.frombuffer(content[8 + length :][first:last], np.uint8).reshape(entry["shape"])


def _decoded(content: bytes) -> np.ndarray:
    """The picture of a PNG whose checksums are right."""
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("no PNG")
    place, kind = 8, b""
    while kind != b"IEND":
        (length,), kind = struct.unpack(">I", content[place : place + 4]), content[place + 4 : place + 8]
        data = content[place + 8 : place + 8 + length]
        if struct.pack(">I", zlib.crc32(kind + data)) != content[place + 8 + length : place + 12 + length]:
            raise ValueError(f"the checksum of {kind!r}")
        if kind[:1].isupper() and kind not in (b"IHDR", b"PLTE", b"IDAT", b"IEND"):
            raise ValueError(f"the chunk {kind!r}, which a reader must know")
        place += 12 + length
    with Image.open(io.BytesIO(content), formats=("PNG",)) as opened:
        return np.asarray(opened.convert("RGB"))


HOSTED = {"protocol": 1, "name": "bad", "version": "1", "wants": "images"}
ANSWER = {"protocol": 1, "version": "1", "scores": [0.5, 1.5], "details": {"x": [1, 2]}}
Given = tuple[int, dict[str, str], bytes]


def _json(value: Any, status: int = 200) -> Given:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


HOSTED_ANSWERS: tuple[Given, ...] = (
    *(
        _json(HOSTED | {name: value})
        for name in ("name", "version", "wants", "protocol")
        for value in (None, 5, [], "other", True)
    ),
    *(_json({key: value for key, value in HOSTED.items() if key != name}) for name in HOSTED),
    *(_json(value) for value in (None, [], 5, "x", {})),
    *(_json(HOSTED, status) for status in (201, 301, 302, 400, 401, 404, 418, 500, 503)),
    *((200, {}, content) for content in (b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000)),
)
SCORES: tuple[Any, ...] = (
    [],
    [1],
    [1, 2, 3],
    None,
    "ab",
    {"a": 1},
    ["a", "b"],
    [True, False],
    [[1], [2]],
    [None, None],
    [1e300, 2],
)
ANSWERS: tuple[Given, ...] = (
    *(_json(ANSWER | {"scores": value}) for value in SCORES),
    *(
        (200, {}, json.dumps(ANSWER).replace("0.5", text).encode())
        for text in ("Infinity", "-Infinity", "NaN", "1e999", "9" * 5000, "1" + "0" * 400)
    ),
    *(
        _json(ANSWER | {"details": value})
        for value in (None, [], "x", {"x": 1}, {"x": [1]}, {"x": [1, "a"]}, {"x": [{"a": 1}, None]})
    ),
    *(
        _json(ANSWER | {"details": value})
        for value in ({"": [1, 2]}, {"\ud800": [1, 2]}, {"x": ["\ud800", "\0"]}, {"x": [2**70, 1]}, {"x": [[1], 2]})
    ),
    *(
        _json(ANSWER | {"details": value})
        for value in ({"error": [5, None]}, {"score": [1, 2]}, {"x" * 10_000: [1, 2]}, {"x": [True, 1]})
    ),
    *(_json(ANSWER | {name: value}) for name in ("version", "protocol") for value in (None, 2, "2", [], True)),
    *(_json({key: value for key, value in ANSWER.items() if key != name}) for name in ANSWER),
    *(_json(value) for value in (None, [], 5, {}, {"error": "x"})),
    *(_json({"error": "it failed"}, status) for status in (400, 401, 403, 404, 413, 418, 500, 501)),
    *(_json([1], status) for status in (400, 413, 500)),
    *((200, {}, content) for content in (b"", b"<html>", b"\xff\xfe", b"[" * 100_000)),
    (200, {"Content-Encoding": "gzip"}, b"no gzip"),
    (200, {"Content-Encoding": "deflate"}, b"\x00\x01"),
    (200, {"Content-Length": "100"}, b"{}"),
    (200, {"Transfer-Encoding": "chunked"}, b"zz\r\nx\r\n0\r\n\r\n"),
    (302, {"Location": "/v1/score"}, b""),
    (302, {"Location": "http://[bad"}, b""),
    (307, {"Location": "ftp://127.0.0.1/x"}, b""),
    (200, {"Content-Type": "text/plain; charset=no-such"}, json.dumps(ANSWER).encode()),
)
STREAMS = (
    b"",
    b"no HTTP at all\r\n\r\n",
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\n: :\r\n\r\n",
)


class _Bad(BaseHTTPRequestHandler):
    """Gives what the path's first part names: /<number>/v1/..."""

    answers: dict[str, tuple[Given, Given | bytes]] = {}

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """The first answer."""
        self._give(self.answers[self.path.split("/")[1]][0])

    def do_POST(self) -> None:
        """The second answer."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._give(self.answers[self.path.split("/")[1]][1] if self.path.count("/") > 2 else (404, {}, b""))

    def _give(self, given: Given | bytes) -> None:
        self.close_connection = True
        if isinstance(given, bytes):
            self.wfile.write(given)
            return
        status, headers, content = given
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@functools.cache
def bad_server() -> str:
    """Address of the server that gives the answers."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), _Bad)
    running.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
    atexit.register(running.server_close)
    return f"http://127.0.0.1:{running.server_address[1]}"


def answers(seed: int) -> list[Case]:
    """What a server may say of its reward and of a batch; and servers that are not there."""
    good = _json(HOSTED)
    pairs: list[tuple[str, Given, Given | bytes]] = [("hosted", given, _json(ANSWER)) for given in HOSTED_ANSWERS]
    pairs += [("answer", good, given) for given in ANSWERS]
    pairs += [("stream", good, given) for given in STREAMS]
    for number in range(40):
        what, changed = damaged(json.dumps(ANSWER).encode(), draws(CLIENT, number, seed))
        pairs.append((f"#{number} {what}", good, (200, {}, changed)))
    cases = [_client_case(name, str(place), first, second) for place, (name, first, second) in enumerate(pairs)]
    urls = (
        "http://127.0.0.1:1",
        "",
        "x",
        "http://",
        "http://[::",
        "ftp://a",
        "http://127.0.0.1:99999",
        "http://a\0b",
        "file:///etc/passwd",
    )
    return cases + [_client_case(f"url {url!r}", url, good, good, url) for url in urls]


def _client_case(name: str, place: str, first: Given, second: Given | bytes, url: str | None = None) -> Case:
    def act(folder: Path) -> RewardResult:
        _Bad.answers[place] = (first, second)
        address = f"{bad_server()}/{place}" if url is None else url
        prompts = [Prompt(f"uid-{number}", "a", None, {}, "") for number in range(2)]
        result = get_reward("remote", url=address, max_retries=0, timeout_s=10)(BATCH, prompts)
        pd.DataFrame(dict(result.details)).to_parquet(folder / "details.parquet")
        return result

    def fault(result: RewardResult) -> str | None:
        if not isinstance(second, tuple):
            return "an answer out of nothing"
        return _fault_of_scores(result, second[2])

    return Case(CLIENT, f"{name} {first[:2] if name == 'hosted' else ''} {str(second)[:120]}", _nothing, act, fault)


def _fault_of_scores(result: RewardResult, content: bytes) -> str | None:
    """The oracle: each score is the answer's number, or missing where that is none to learn from."""
    try:
        said = json.loads(content)
        scores = said["scores"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"scores out of {error!r}"
    if not isinstance(scores, list) or len(scores) != 2 or said.get("version") != "1":
        return f"scores out of {said!r:.100}"
    if said["protocol"] != 1 or isinstance(said["protocol"], bool):
        return "another protocol"
    for score, taken in zip(scores, result.scores, strict=True):
        if isinstance(score, bool) or not isinstance(score, int | float | None):
            return f"{score!r} became {taken}"
        usable = score is not None and abs(score) < 3e38
        if usable != math.isfinite(taken) or (usable and not math.isclose(score, taken, rel_tol=1e-6)):
            return f"{score!r} became {taken}"
    return None


def whole() -> list[Case]:
    """Requests and an answer by the protocol."""
    request = request_part(body())
    sent = [[request, tensor(safetensors())], [request, image(png()), image(png(BATCH[1]))]]
    answered = _client_case("whole", "whole", _json(HOSTED), _json(ANSWER))
    return [*(_parts_case("whole", parts) for parts in sent), answered]
