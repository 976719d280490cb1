# SPDX-License-Identifier: Apache-2.0
"""Many files are digested side by side, and nobody who ends waits for them."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasks.system.files import READERS, sha256_of_each
from tests.tasks.cli.test_stopping import heeds_ctrl_c

ROOT = Path(__file__).parents[3]
DIGESTS = """
import sys
from pathlib import Path
from tasks.system.files import sha256_of_each

print(*sha256_of_each([Path(name) for name in sys.argv[1:]]), flush=True)
"""
PATIENCE_S = 120


def digesting(*files: Path) -> subprocess.Popen[str]:
    """A process that prints the files' digests."""
    program = [sys.executable, "-c", DIGESTS, *map(str, files)]
    return subprocess.Popen(
        program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds_ctrl_c
    )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("count", [0, 1, 3 * READERS + 1])
def test_each_file_has_its_own_digest(tmp_path: Path, count: int) -> None:
    contents = [os.urandom(100_000 * (number % 5)) for number in range(count)]
    files = [tmp_path / str(number) for number in range(count)]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert sha256_of_each(files) == [sha256(content) for content in contents]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"there")
    with pytest.raises(FileNotFoundError, match="gone"):
        sha256_of_each([tmp_path / "there", tmp_path / "gone", tmp_path / "there"])


def test_several_files_are_read_at_a_time(tmp_path: Path) -> None:
    """Each is a pipe that is filled after the next one: whoever reads one after the other waits for ever."""
    pipes = [tmp_path / str(number) for number in range(READERS)]
    for pipe in pipes:
        os.mkfifo(pipe)
    process = digesting(*pipes)

    def fill() -> None:
        for pipe in reversed(pipes):
            pipe.write_bytes(pipe.name.encode())  # opening it waits for who reads

    threading.Thread(target=fill, daemon=True).start()
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert output.split() == [sha256(pipe.name.encode()) for pipe in pipes]


def test_a_signal_ends_who_waits_for_digests(tmp_path: Path) -> None:
    """Though a file is being read, which here never ends, and others are still to be."""
    pipe, other = tmp_path / "pipe", tmp_path / "other"
    os.mkfifo(pipe)
    other.write_bytes(b"other")
    process = digesting(*[pipe] * READERS, other)
    writer = pipe.open("wb")  # returns when somebody reads
    try:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        writer.close()
    assert "KeyboardInterrupt" in errors
