# SPDX-License-Identifier: Apache-2.0
"""A process is known by its pid and its start; real processes."""

import errno
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tasks.system.processes import (
    ProcessIdentity,
    maker_lives,
    named_after_this_process,
    wait_or_kill,
    wait_until_ended,
)
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.waits


def test_an_identity_is_of_one_process_alone() -> None:
    own = ProcessIdentity.of(os.getpid())
    assert own.process() == psutil.Process()
    assert own._replace(started=own.started - 1).process() is None, "the pid was another process' before"
    assert own._replace(boot="before").process() is None
    assert ProcessIdentity.parsed(str(own)) == ProcessIdentity(*json.loads(json.dumps(own))) == own


def test_one_that_ended_is_none_also_before_its_parent_asks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity.process() is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.process() is None
    child.wait()
    assert identity.process() is None
    with pytest.raises(psutil.NoSuchProcess):
        ProcessIdentity.of(child.pid)


def test_a_folders_name_says_whether_its_maker_lives_where_that_can_be_known() -> None:
    """Of another machine's a process here that has the number says nothing, nor that none has."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    mine = named_after_this_process("made-")
    gone = mine.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
    assert [maker_lives(f"{name}ab_c", "made-") for name in (mine, gone)] == [True, False]
    for pid in (os.getpid(), ended.pid):
        assert maker_lives(f"made-another-machine-{pid}-ab_c", "made-") is None


def test_a_name_may_hold_brackets_and_blanks() -> None:
    name = "from pathlib import Path; Path('/proc/self/comm').write_text('a) b (c'); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    hertz = os.sysconf("SC_CLK_TCK")
    started = psutil.Process(child.pid).create_time() - psutil.boot_time()
    assert ProcessIdentity.of(child.pid).started == round(started * hertz)
    child.communicate(b"\n")


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), OSError(errno.EINVAL, "ending")])
def test_a_kernel_that_opens_no_pidfd_of_one_that_ends(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def refuse(*_: int) -> int:
        raise error

    monkeypatch.setattr(os, "pidfd_open", refuse)
    waits = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    children = [
        subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in "ab"
    ]
    for child in children:
        child.stdout.readline()
    first, second = (psutil.Process(child.pid) for child in children)
    children[0].stdin.close()
    assert wait_until_ended([first], PATIENCE) == []
    assert wait_until_ended([first, second], 0.1) == [second]
    assert wait_or_kill([first, second], 3) == []
    assert [child.wait(PATIENCE) for child in children] == [1, -signal.SIGKILL]
