# SPDX-License-Identifier: Apache-2.0
"""What an error says of a server's log."""

import os
import subprocess

import pytest

from tasks.actors.server_log import MOST_BYTES, READ_BYTES, ServerLog

OF_THE_ENGINE = "(EngineCore pid=7) ERROR 11-26 17:15:07 [core.py:1366] "
OF_THE_SERVER = "(APIServer pid=5) "
WAITED = [
    "Traceback (most recent call last):",
    *(f'  File "vllm/v1/engine/core_client.py", line {number}, in __init__' for number in range(40)),
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]


def written(*lines: str, secret: str = "none") -> ServerLog:
    log = ServerLog(secret)
    os.write(log.descriptor, "\r\n".join(lines).encode())
    return log


def test_the_process_that_failed_is_heard_and_not_only_the_one_that_waited() -> None:
    failed = [
        "Traceback (most recent call last):",
        '  File "hasher.py", line 39, in _get',
        "ModuleNotFoundError: No module named 'blake3'",
    ]
    log = written(*(OF_THE_ENGINE + line for line in failed), *(OF_THE_SERVER + line for line in WAITED))
    assert log.reason().startswith(
        "the errors in its log: ModuleNotFoundError: No module named 'blake3' | RuntimeError: Engine core "
        "initialization failed. See root cause above. Failed core proc(s): {}; the end of its log: "
    )
    last = " | ".join(OF_THE_SERVER + line for line in WAITED[-2:])
    assert log.reason().endswith(f"; the end of its log: {last}"), "of a traceback that waited no more is shown"


def test_of_a_long_log_the_end_is_read() -> None:
    log = written("ValueError: of an earlier day", "x" * READ_BYTES, "ValueError: of today")
    assert log.reason().startswith("the errors in its log: ValueError: of today; ")


def test_an_error_is_told_once_and_old_ones_give_way_to_new_ones() -> None:
    log = written(*(f"ValueError: {number // 2}" for number in range(20)))
    told, _, _ = log.reason().partition(";")
    assert told == "the errors in its log: ValueError: 6 | ValueError: 7 | ValueError: 8 | ValueError: 9"


def test_without_an_exception_its_last_lines_tell() -> None:
    assert written(*map(str, range(30))).reason() == f"the end of its log: {' | '.join(map(str, range(15, 30)))}"
    assert written().reason() == "the end of its log: empty"


def test_the_next_servers_log_is_its_own() -> None:
    log = written("torch.OutOfMemoryError: CUDA out of memory.")
    log.clear()
    os.write(log.descriptor, b"up")
    assert log.reason() == "the end of its log: up"


def test_what_is_kept_and_told_has_no_secret(capfd: pytest.CaptureFixture[str]) -> None:
    log = written("first", "key aBc", "RuntimeError: key aBc", secret="aBc")
    log.keep()
    kept = capfd.readouterr().err
    assert "first" in kept
    assert "key ***" in kept
    assert "aBc" not in kept + log.reason()


def test_a_long_log_is_cut_to_its_end_and_the_server_writes_on() -> None:
    """A server that has the descriptor already; a hole before its next line would be read as the log's end."""
    log = ServerLog("none")
    lines = f"yes 200 OK | head -c {MOST_BYTES}; echo; echo ValueError: before; read _; echo ValueError: after"
    server = subprocess.Popen(["sh", "-c", lines], stdout=log.descriptor, stdin=subprocess.PIPE)
    while "before" not in log.reason():
        assert server.poll() is None
    log.trim()
    assert os.fstat(log.descriptor).st_size == READ_BYTES
    server.communicate(b"\n")
    size = os.fstat(log.descriptor).st_size
    assert size == READ_BYTES + len("ValueError: after\n")
    assert log.reason().startswith("the errors in its log: ValueError: before | ValueError: after; ")
    log.trim()
    assert os.fstat(log.descriptor).st_size == size, "one that is short stays as it is"
