# SPDX-License-Identifier: Apache-2.0
"""A judge that speaks the OpenAI API over real HTTP on loopback, and misbehaves on request."""

import base64
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

KEY = "sk-very-secret-0123456789"


@dataclass
class Judging:
    """What the server saw.

    Attributes:
        url: of the API.
        bodies: of all requests.
        calls: requests by the word that stands in the question between square brackets.
        most: the most requests that were under way at once.
    """

    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    calls: Counter = field(default_factory=Counter)
    most: int = 0
    under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def judge_server() -> Iterator[Judging]:
    """Serve during the block. "[word]" in a question decides what happens to it; without one it is answered."""
    state = Judging()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            image, text = body["messages"][0]["content"]
            word = text["text"].partition("[")[2].partition("]")[0]
            with state.lock:
                state.bodies.append(body)
                state.calls[word] += 1
                first = state.calls[word] == 1
                state.under_way += 1
                state.most = max(state.most, state.under_way)
            try:
                self.misbehave(word, first, brightness(image["image_url"]["url"]))
            finally:
                with state.lock:
                    state.under_way -= 1

        def misbehave(self, word, first, level):
            grades = f"Alignment Score (1-5): {level}\nCoherence: 3\n**Style**: 4.5"
            if self.path != "/v1/chat/completions":
                return self.send(404, {"error": {"message": f"no such path {self.path}"}})
            if word == "locked" and self.headers["Authorization"] != f"Bearer {KEY}":
                return self.send(401, {"error": {"message": f"wrong: {self.headers['Authorization']}"}})
            if word == "echo":
                return self.send(400, {"error": {"message": f"refused, you sent {self.headers['Authorization']}"}})
            if (word == "busy" and first) or word == "always busy":
                return self.send(429, {"error": {"message": "too many"}}, {"Retry-After": "0.05"})
            if (word == "broken" and first) or word == "always broken":
                return self.send(500, {"error": {"message": "out of order"}}, {"retry-after-ms": "50"})
            if (word == "slow" and first) or word == "always slow":
                time.sleep(4)
            if word == "crowd":
                time.sleep(0.05)
            if (word == "cut" and first) or word == "always cut":
                return self.send_raw(200, json.dumps(answer(grades)).encode()[:60])
            if word == "prose" and first:
                return self.send(200, answer("What a lovely picture, I like it."))
            if word == "always prose":
                return self.send(200, answer("The alignment is fine. Style 4, coherence 9."))
            if word == "contradiction":
                return self.send(200, answer(f"Alignment: 2\n{grades}"))
            if word == "endless":
                return self.send(200, answer(grades + "\n" * 4000))
            if word == "quoted":
                return self.send(200, answer(f"The picture says 'Alignment: 5, Style: 5'.\n{grades}"))
            if word == "long":
                return self.send(200, answer(grades, "length"))
            if word == "empty":
                return self.send(200, answer(None))
            if word == "filtered":
                return self.send(200, {**answer(None), "choices": [{"index": 0, "finish_reason": "content_filter"}]})
            if word == "parts":
                return self.send(200, answer([{"type": "text", "text": grades}]))
            if word == "no UTF-8":
                return self.send_raw(200, json.dumps(answer("?")).encode().replace(b"?", b"\xff"))
            if word.startswith("says "):
                return self.send(200, answer(word.removeprefix("says ")))
            return self.send(200, answer(grades))

        def send(self, status, body, headers=()):
            self.send_raw(status, json.dumps(body).encode(), headers)

        def send_raw(self, status, content, headers=()):
            self.send_response(status)
            for name, value in dict(headers).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            try:
                self.wfile.write(content)
            except BrokenPipeError:  # the client gave up waiting
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def answer(text, finish_reason="stop") -> dict:
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}


def brightness(url: str) -> int:
    """The picture's brightness in five levels, 1 to 5: proof that it arrived."""
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))))
    return 1 + int(picture.mean() // 51.1)
