# SPDX-License-Identifier: Apache-2.0
"""Keys planted wherever a user may keep one are, after a run that needs two of them, nowhere else."""

import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.support.patience import wait_until
from tests.support.platform_helpers import Workspace, paths_below
from tests.support.processes import words_of

ROOT = Path(__file__).parents[2]
CODE = ("flows", "tasks", "models")
KEYS = {
    place: f"planted-{place}-{number}7Qx4vN2kLw"
    for number, place in enumerate(
        ("variable", "block", "dotenv", "private", "address", "option", "remote", "mlflow", "served", "wandb")
    )
}


class Scorer(http.server.BaseHTTPRequestHandler):
    """A hosted reward behind a proxy that wants a token; it repeats the token wherever it may say something."""

    wanted: set[str] = set()
    seen: set[str] = set()

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer({"name": "scorer", "version": "1", "wants": "images"})

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        prompts, _ = json.JSONDecoder().raw_decode(content[content.index(b'{"protocol"') :].decode("latin-1"))
        scores = [float(number) for number in range(len(prompts["prompts"]))]
        self.answer({"version": "1", "scores": scores, "details": {"said": [self.token()] * len(scores)}})

    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def answer(self, body: dict) -> None:
        if self.token() in self.wanted:
            self.seen.add(self.token())
        status, told = (200, body) if self.token() in self.wanted else (401, {"error": "no"})
        content = json.dumps({"protocol": 1} | told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def scorer() -> Iterator[str]:
    Scorer.wanted, Scorer.seen = {KEYS["variable"], KEYS["block"]}, set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def project(workspace: Workspace) -> Iterator[Workspace]:
    """A user's clone of a repository with a token in its address, an untracked `.env` and a private key."""
    folder, short = workspace.folder, tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
    origin = folder.with_name("origin")
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".gitignore").write_text("runs\nmlruns\nmlflow.db\n__pycache__\ndata\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "all")
    folder.rename(origin)
    git(origin, "clone", "--quiet", str(origin), str(folder))
    (origin / "data").rename(folder / "data")
    git(folder, "remote", "set-url", "origin", f"https://oauth2:{KEYS['remote']}@example.org/me/project.git")
    (folder / ".env").write_text(f"SCORER_TOKEN={KEYS['dotenv']}\n")
    private = "-----BEGIN OPENSSH PRIVATE" + f" KEY-----\n{KEYS['private']}\n"
    (folder / "id_rsa").write_text(private)
    with short:
        yield replace(
            workspace, environment=workspace.environment | {"PYTHONPATH": str(folder), "RAY_TMPDIR": short.name}
        )


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)


def from_block(environment: dict[str, str]) -> str:
    """A secret that was put into a block of the Prefect server, and is had from there."""
    with temporary_settings({PREFECT_API_URL: environment["PREFECT_API_URL"]}):
        Secret(value=KEYS["block"]).save("scorer-key")
        return Secret.load("scorer-key").get()


def remote(url: str, **options: str) -> dict:
    return {"reward": "remote", "options": {"url": url} | options}


def refused(project: Workspace, reward: dict, *settings: str) -> str:
    """What a run with this reward and these settings says, which must be that it takes no key there."""
    said = project.train(f"reward.functions={json.dumps({'scorer': reward})}", *settings, check=False)
    assert re.search(r"would be recorded", said), said[-2000:]
    return said


@pytest.mark.slow
def test_a_key_is_nowhere_but_where_it_was_planted(project: Workspace, scorer: str) -> None:
    """MLflow, Prefect's data base, run folders, other trackers, logs, reports and command lines hold none of them.

    Environments of processes do: that is how a key is given, and other users cannot read them (proc(5), environ).
    """
    said = refused(project, remote(scorer.replace("//", f"//me:{KEYS['address']}@")))
    said += refused(project, remote(scorer, token=KEYS["option"]))
    judge = {"reward": "judge_grade", "options": {"axes": ["alignment"]}}
    served = {"model_path": "data/base_model", "arguments": ["--api-key", KEYS["served"]]}
    said += refused(project, judge, f"reward.reward_model={json.dumps(served)}")
    said += refused(project, judge, f"tracking.uri=http://me:{KEYS['mlflow']}@127.0.0.1:9")
    project.environment.update(SCORER_TOKEN=KEYS["variable"], OTHER_TOKEN=from_block(project.environment))
    project.environment.update(WANDB_API_KEY=KEYS["wandb"], WANDB_MODE="offline")
    functions = {"one": remote(scorer, token_env="SCORER_TOKEN"), "other": remote(scorer, token_env="OTHER_TOKEN")}
    settings = (
        f"reward.functions={json.dumps(functions)}",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
        "tracking.also=[tensorboard, wandb]",
    )
    changes = [word for setting in settings for word in ("--set", setting)]
    program = project.start("-m", "flows.train", "tiny", *changes)
    commands: dict[str, set[str]] = {}
    written: dict[str, set[Path]] = {}
    known: dict[Path, tuple[int, int]] = {}

    def ended() -> bool:
        collect(commands, command_lines())
        collect(written, files_of(Path(project.environment["RAY_TMPDIR"]), known=known))
        return program.poll() is not None

    wait_until(ended, "the run's end", every=0.3)
    said += program.output()
    assert program.poll() == 0, program.output()[-6000:]
    assert Scorer.seen == Scorer.wanted, "the run had the two keys that it needs"
    assert any("ray" in command for command in commands["seen"]), "command lines were seen"

    home = Path(project.environment["PREFECT_HOME"])
    planted = {project.folder / name for name in (".env", "id_rsa", ".git/config")}
    for folder in (project.folder, home, project.folder.with_name("origin")):
        collect(written, files_of(folder, planted))
    read = written["read"]
    names = {path.name for path in read}
    assert {"mlflow.db", "prefect.db", "code.patch", "environment.json", "run.json", "config.json"} <= names
    assert {"report.html"} <= names
    assert any(name.endswith(".wandb") for name in names), "W&B's own record was read"
    assert any(name.startswith("events.out.tfevents") for name in names)
    logs = "".join(path.read_text() for path in project.folder.parent.glob("*.log"))
    found = {place: written.get(place, set()) for place in KEYS if place in written}
    assert not found
    assert not [place for place, key in KEYS.items() if place in commands or key in said + logs]


def collect(into: dict[str, set], found: dict[str, set]) -> None:
    for name, entries in found.items():
        into.setdefault(name, set()).update(entries)


def places(content: bytes) -> list[str]:
    """Whose keys are in it."""
    return [place for place, key in KEYS.items() if key.encode() in content]


def command_lines() -> dict[str, set[str]]:
    """Of all processes: "seen", and those with a key under its place."""
    found: dict[str, set[str]] = {"seen": set()}
    for process in psutil.process_iter():
        command = " ".join(words_of(process))
        found["seen"].add(command[:300])
        for place in places(command.encode()):
            found.setdefault(place, set()).add(command)
    return found


def files_of(
    folder: Path, planted: set[Path] | None = None, known: dict[Path, tuple[int, int]] | None = None
) -> dict[str, set[Path]]:
    """Of all files below that have changed since they were `known`: "read", and those with a key under its place."""
    found: dict[str, set[Path]] = {"read": set()}
    for path in paths_below(folder):
        try:
            if path.is_symlink() or not path.is_file() or path in (planted or set()):
                continue
            state = path.stat().st_mtime_ns, path.stat().st_size
            if known is not None and known.get(path) == state:
                continue
            content = path.read_bytes()
        except OSError:  # gone since, or a socket
            continue
        found["read"].add(path)
        if known is not None:
            known[path] = state
        for place in places(content):
            found.setdefault(place, set()).add(path)
    return found
