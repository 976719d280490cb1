# SPDX-License-Identifier: Apache-2.0
"""A judge as a program of its own, with a secret, a sleep and a process below it, as vLLM's server has them.

`python -m tests.support.served_judge PORT NAME JOURNAL [OPTION ...]` serves on 127.0.0.1 and writes a line to the
journal for its start (its pid and that of its engine), each sleep and wake, and each question asked while it sleeps.
Options: `without-sleep`; `never-wakes`, which leaves that order unanswered; `fails-to-wake`; `dies-of=ORDER` (`/sleep`,
`/wake_up`), the first time; `dies=LEVEL:TIMES` when it is asked about a picture of a brightness, so many times in all;
`starts=TIMES` and then no more. The last three are in the journal, too.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.judge_server import brightness

ENGINE = "import time; time.sleep(7200)"


def main(port: str, name: str, journal: str, *options: str) -> None:
    asleep = False
    (starts,) = [int(option[7:]) for option in options if option.startswith("starts=")] or [sys.maxsize]
    ((deadly, times),) = [o[5:].split(":") for o in options if o.startswith("dies=")] or [("", "0")]

    def note(words: str) -> None:
        with Path(journal).open("a") as file:
            file.write(f"{words}\n")

    if Path(journal).exists() and Path(journal).read_text().count("start ") >= starts:
        note("no start")
        sys.exit("no such device")
    engine = subprocess.Popen([sys.executable, "-c", ENGINE])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            if not self.is_known():
                return None
            return self.send(200 if self.path == "/v1/models" else 404, {"data": [{"id": name}]})

        def do_POST(self):
            nonlocal asleep
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            order = self.path.partition("?")[0]
            if f"dies-of={order}" in options and "dies" not in Path(journal).read_text().split():
                note("dies")
                threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()  # its end takes a while
                server.socket.close()
                return self.connection.shutdown(socket.SHUT_RDWR)
            if order in ("/sleep", "/wake_up") and "without-sleep" not in options:
                asleep = order == "/sleep"
                note(self.path)
                if order == "/wake_up" and "never-wakes" in options:
                    time.sleep(7200)
                fails = order == "/wake_up" and "fails-to-wake" in options
                return self.send(500 if fails else 200, {})
            if order != "/v1/chat/completions":
                return self.send(404, {"error": {"message": f"no such path {self.path}"}})
            return self.is_known() and self.grade(json.loads(body))

        def grade(self, body):
            if asleep:
                note("asked while asleep")
            image, _ = body["messages"][0]["content"]
            level = brightness(image["image_url"]["url"]) if body["model"] == name else "unknown model"
            if str(level) == deadly and Path(journal).read_text().count("dies") < int(times):
                note("dies")
                print("out of memory", flush=True)
                os._exit(3)
            message = {"role": "assistant", "content": f"Alignment: {level}\nCoherence: 3\nStyle: 3"}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": name}
            self.send(200, answer | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

        def is_known(self):
            if self.headers["Authorization"] != f"Bearer {os.environ['REWARD_MODEL_KEY']}":
                self.send(401, {"error": {"message": "who are you?"}})
                return False
            return True

        def send(self, status, content):
            payload = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    note(f"start {os.getpid()} {engine.pid}")
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
