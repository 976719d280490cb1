# SPDX-License-Identifier: Apache-2.0
"""A sweep's run is a process of its own, and the process that it is a fork of ends when nobody is forked any more."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[3]
PARENT = """
import os
import sys
from pathlib import Path

import psutil

from tasks.system.processes import wait_until_ended

print("runs as", __name__, flush=True)

def fork_servers():
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children() if child.status() != "zombie"]
    return sum("multiprocessing.forkserver" in line for line in lines)

if __name__ == "__main__":
    from tasks.cli.terminal import command_line
    from tasks.actors import child_run as runs
    from tasks.config.tree import TrainConfig

    runs.IMPORTED = ("tasks.cli.commands",)
    log, file = Path("child.log"), Path("none.json")
    with runs.shared_place(TrainConfig(), 1):
        with runs.child_run(file, Path("runs"), log, None, "parent", {}) as child:
            child.process.join()
        servers = [each for each in psutil.Process().children() if "forkserver" in " ".join(each.cmdline())]
        print("fork servers", len(servers))
        os.mkfifo("config.json")
        with runs.child_run(Path("config.json"), Path("runs"), Path("ended.log"), None, "parent", {}) as ended:
            pipe = open("config.json", "w")  # waits until the child reads it, which goes on reading
    print("left", len(wait_until_ended(servers, 20)))
    print("child", child.exit_code(), log.read_text().strip())
    print("ended", ended.exit_code(), Path("ended.log").read_text().strip())
    runs._be_command(["--config", "a file.json"])
    print(command_line().partition(" ")[2])
"""


def test_a_run_is_its_own_command_and_its_fork_server_ends(tmp_path: Path) -> None:
    """Nothing of the parent's main module is run again for it, and nothing is said in the parent's terminal.

    The parent ignores Ctrl-C, as what a script starts in the background does: a run ends all the same when it is to.
    """
    (tmp_path / "parent.py").write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "nobody-asks:1"}
    done = subprocess.run(
        [sys.executable, "-m", "parent"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.stderr == ""
    first, servers, left, child, ended, command = done.stdout.splitlines()
    assert (first, servers, left) == ("runs as __main__", "fork servers 1", "left 0")
    assert child.startswith("child 2 error: ")
    assert "none.json" in child
    assert ended == "ended 143 stopped by SIGTERM"
    assert command == "-m flows.train --config 'a file.json'"
