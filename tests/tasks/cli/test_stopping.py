# SPDX-License-Identifier: Apache-2.0
"""How a command ends at Ctrl-C, SIGTERM and with its terminal: one sentence, the command that continues, 130 or 143."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import typer

from models.errors import causes
from tasks.cli.stopping import handled, raise_it
from tasks.cli.terminal import in_a_sentence

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[3]
SIGNALS = [(signal.SIGINT, "stopped by Ctrl-C", 130), (signal.SIGTERM, "stopped by SIGTERM", 143)]


def heeds_ctrl_c() -> None:
    """A process that a script starts in the background ignores it, as these tests may be."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "said", "code"), SIGNALS)
def test_before_anything_began_a_command_ends_at_once(
    tmp_path: Path, number: signal.Signals, said: str, code: int
) -> None:
    """While it reads its config, which comes out of a pipe that nobody writes to."""
    config = tmp_path / "config.json"
    os.mkfifo(config)
    command = [sys.executable, "-m", "flows.train", "--config", str(config)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds_ctrl_c
    )
    with config.open("w"):  # waits until the command reads it
        process.send_signal(number)
        assert process.communicate() == ("", f"{said}\n")
    assert process.returncode == code


def test_the_imports_of_a_command_end_without_frames(tmp_path: Path) -> None:
    """Before a command knows its arguments."""
    code = "import os; from tasks.cli.stopping import end_now, handle; handle(end_now); os.kill(os.getpid(), 2)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, preexec_fn=heeds_ctrl_c
    )
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")
    for name in ("train", "validate", "sweep", "reproduce", "compare"):
        first = (ROOT / f"flows/{name}.py").read_text().split('if __name__ == "__main__":', 1)[1]
        assert first.index("handle(end_now)") < first.index("from tasks.cli.commands")


def send(number: int, ended: list[bool]) -> None:
    """A signal to this process, which has something to end."""
    try:
        os.kill(os.getpid(), number)
        time.sleep(60)
    except BaseException as error:
        ended.append(True)
        error.add_note("continue: the same command")
        raise


@pytest.mark.parametrize(("number", "said", "code"), SIGNALS)
def test_what_had_begun_is_ended_first(
    number: signal.Signals, said: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    earlier, ended = signal.signal(signal.SIGINT, signal.default_int_handler), []
    before = [signal.getsignal(each) for each, *_ in SIGNALS]
    try:
        with pytest.raises(typer.Exit) as exit_, in_a_sentence(), handled(raise_it):
            send(number, ended)
        assert [signal.getsignal(each) for each, *_ in SIGNALS] == before
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert ended
    assert exit_.value.exit_code == code
    assert capfd.readouterr().err == f"{said}\ncontinue: the same command\n"


def interrupted_within_prefect() -> None:
    """As its engine does it, where a task is about to begin."""
    try:
        raise KeyboardInterrupt
    finally:
        raise ValueError("Task run is not set")


def test_an_error_that_the_interrupt_left_behind_is_the_interrupt(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_, in_a_sentence():
        interrupted_within_prefect()
    assert exit_.value.exit_code == 130
    assert capfd.readouterr().err == "stopped by Ctrl-C\n"


def test_what_is_its_own_cause_has_an_end() -> None:
    """A signal that is raised again while what it led to is handled."""
    signal_, consequence = KeyboardInterrupt(), SystemError("returned a result with an exception set")
    consequence.__cause__, signal_.__context__ = signal_, consequence
    assert list(causes(consequence)) == [consequence, signal_]


ENDING = """
import atexit, os, signal, sys, time
from tasks.cli.terminal import run_command, in_a_sentence
from tasks.cli.stopping import handle, raise_it, say_at_once

class Left:
    def __del__(self):
        os.write(2, b"taken down\\n")

def command() -> None:
    with in_a_sentence():
        globals()["kept"] = Left()
        atexit.register(os.write, 2, b"at exit\\n")
        handle(raise_it)
        say_at_once()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            time.sleep(1)  # as where it is in a library's hands
            print("ended", file=sys.stderr)

run_command(command)
"""


def test_it_is_said_at_once_and_the_end_is_an_end() -> None:
    """Before what has to be ended; after that nothing is done but what is registered for the process's end."""
    done = subprocess.run([sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "stopped by SIGTERM\nended\nat exit\n")


WAITING = """
import os, sys
from tasks.cli.terminal import run_command, in_a_sentence
from tasks.cli.stopping import handle, raise_it, say_at_once
from tasks.system.signals import LastWait, unheeded_while

def command() -> None:
    with in_a_sentence():
        handle(raise_it)
        say_at_once()
        over = []
        unheeded_while(lambda: not over)
        LastWait(lambda: bool(over), "all is done", lambda: os.write(2, b"left\\n")).begin()
        print("waits", flush=True)
        over.append(sys.stdin.readline())
        print("over", flush=True)
        sys.stdin.readline()

run_command(command)
"""


@pytest.mark.parametrize(("number", "said", "code"), SIGNALS)
def test_where_all_is_done_a_second_signal_ends_the_wait(number: signal.Signals, said: str, code: int) -> None:
    """The first is answered, though the main thread is in a library's hands; afterwards one is what it always was."""
    for ends, last in ((False, "left\n"), (True, f"{said}\n")):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", WAITING], cwd=ROOT, preexec_fn=heeds_ctrl_c, **pipes) as process:
            assert process.stdout.readline() == "waits\n"
            process.send_signal(number)
            assert process.stderr.readline() == "all is done\n"
            if ends:
                process.stdin.write("over\n")
                process.stdin.flush()
                assert process.stdout.readline() == "over\n"
            process.send_signal(number)
            assert process.stderr.read() == last
        assert process.returncode == code


HANGING_UP = """
import sys, time
from pathlib import Path
from tasks.cli.terminal import run_command, in_a_sentence
from tasks.cli.stopping import handle, heed_hangup, raise_it, say_at_once

def command() -> None:
    with in_a_sentence():
        handle(raise_it)
        heed_hangup()
        say_at_once()
        try:
            print("begun", flush=True)
            time.sleep(60)
        finally:
            print("to nobody", file=sys.stderr, flush=True)
            Path("ended").touch()

run_command(command)
"""


def take_terminal() -> None:
    """Be at the terminal that is standard input, whose end is SIGHUP then."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_the_end_of_the_terminal_is_one_in_order(tmp_path: Path) -> None:
    """As where a connection by ssh breaks: what there is to say would be an error."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING_UP],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    with open(ours, "rb") as terminal:
        assert terminal.readline() == b"begun\r\n"
    assert process.wait() == 143
    assert (tmp_path / "ended").exists()
