# SPDX-License-Identifier: Apache-2.0
"""How a command ends that does not end well: in one sentence, and with an exit code that says which end it was."""

import logging
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from models.errors import DoubleflowError, causes, full_disk, is_refused
from models.registry import WrongAnswer
from tasks.actors.watchdog import watchdog
from tasks.cli.lost_events import FirstOfLostEvents, give_up_events
from tasks.cli.stopping import (
    Handler,
    Stopped,
    end_now,
    forget_said,
    handle,
    handled,
    heed_hangup,
    leave_early,
    raise_it,
    say,
    say_at_once,
    signal_of,
    stop_message,
)
from tasks.config.errors import described
from tasks.config.tree import TrainConfig
from tasks.system.access import TEMPORARY_SERVER, guard_temporary_server, start_temporary_server
from tasks.system.files import free_on_disk
from tasks.system.heartbeats import heartbeats
from tasks.system.late_mlflow import mlflow
from tasks.system.processes import beside_python

WRONG_INPUT, FAILED = 2, 1
WORKER = re.compile(r"^\s*(class_name|pid|ip): (.+)$", re.MULTILINE)
"""What Ray says of an actor that has died, among other things."""
Debug = Annotated[bool, typer.Option("--debug", help="Show an error's whole traceback.")]


def run_command(main: Callable[..., None]) -> None:
    """Run a function as a command with its arguments from the command line; it does not return."""
    try:
        command_of(main)()
    except SystemExit as end:
        leave_early(end.code if isinstance(end.code, int) else int(end.code is not None))
        give_up_events()
        raise


def command_of(main: Callable[..., None]) -> typer.Typer:
    """The same as an object that can be called with other arguments."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    return app


class Commands(TyperGroup):
    """Sub-commands whose errors are `in_a_sentence`; `--debug`, an option of the group, stands before the command."""

    def invoke(self, ctx: Any) -> Any:
        """What the sub-command returns that was asked for."""
        with in_a_sentence(ctx.params.get("debug", False), on_signal=raise_it):
            return super().invoke(ctx)


def commands(help_text: str) -> typer.Typer:
    """An application of sub-commands."""
    app = typer.Typer(
        cls=Commands, help=help_text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )

    @app.callback()
    def options(debug: Debug = False) -> None:
        pass

    options.__doc__ = help_text
    return app


@contextmanager
def in_a_sentence(debug: bool = False, on_signal: Handler = end_now) -> Iterator[None]:
    """An error of the block that was raised for the user ends the command with its message alone, and its notes.

    So do Ctrl-C and SIGTERM, by default at once until `run_flow`. Any other error is a defect, and has its
    traceback: once, Prefect's logger does not show it too. Libraries' warnings about each other are not shown.
    """
    if debug:
        yield
        return
    forget_said()
    try:
        with warnings.catch_warnings(), handled(on_signal):
            warnings.simplefilter("ignore")
            yield
    except BaseException as error:
        said, code = last_words(error)
        if said is None:
            raise
        if number := signal_of(error):
            say(number)
        else:
            if code != WRONG_INPUT and sys.stderr.isatty():  # below the bar
                typer.echo(err=True)
            typer.echo(said, err=True)
        for line in dict.fromkeys(_notes(error)):
            if line != said:
                typer.echo(line, err=True)
        raise typer.Exit(code) from None


def last_words(error: BaseException) -> tuple[str | None, int]:
    """What the user is told of an error, and the exit code; None of one that was not raised to be read by one."""
    if not isinstance(error, Exception | KeyboardInterrupt | Stopped):
        return None, 0
    if number := signal_of(error):
        return stop_message(number), 128 + number
    assert isinstance(error, Exception)
    said = sentence(error)
    return None if said is None else f"error: {said}", exit_code(error)


def _notes(error: BaseException | None) -> Iterator[str]:
    """Its own and those of what it came from: Prefect makes one error of another at SIGTERM."""
    for found in causes(error):
        yield from getattr(found, "__notes__", [])


def sentence(error: Exception) -> str | None:
    """What the user is told; None for an error that was not raised to be read by one."""
    told = cause_of(error)
    if (full := full_disk(error)) is not None:
        return f"a disk is full: {full}{_where_little_is_free() if full.filename is None else ''}"
    if is_refused(told):
        return f"a file or folder cannot be used: {told}"
    if isinstance(told, ValidationError):
        return described(told, TrainConfig)
    if isinstance(told, DoubleflowError) or _is_one_of(told, ("prefect.exceptions", "FailedRun")):
        return str(told)
    if _is_one_of(told, ("mlflow.exceptions", "MlflowException")):
        return f"MLflow: {' '.join(str(told).split())}"
    if _is_one_of(told, ("ray.exceptions", "RayActorError")):
        return f"a worker process died: {_death(str(told))}"
    if _is_one_of(told, ("prefect.exceptions", "PrefectHTTPStatusError")) and (failure := _server_failure(told)):
        return f"Prefect's server failed ({failure}): what it prints says why, as where its database's disk is full"
    if _is_one_of(told, ("httpx", "TransportError")):  # which only Prefect's client lets through
        return f"Prefect's server at {os.environ.get('PREFECT_API_URL', 'its address')} does not answer: {told!r}"
    return None


def _server_failure(told: Any) -> str | None:
    """What a server answered to what, where the fault is its own."""
    answer = told.response
    return f"{answer.status_code} for {told.request.url.path}" if answer.is_server_error else None


def _death(told: str) -> str:
    """Which of them, and of what, as Ray tells it: without numbers of its own, and causes that may be any death's."""
    found = dict(WORKER.findall(told))
    why = " ".join(told.partition("Worker exit detail: ")[2].partition(" Some common causes")[0].split())
    if not why or found.keys() != {"class_name", "pid", "ip"}:
        return " ".join(told.split())
    who = f"{found['class_name']}, process {found['pid']} on {found['ip']}"
    return f"{who} ({why.rstrip('.')}): where the kernel killed it for want of memory, `dmesg` there tells so"


def _where_little_is_free() -> str:
    """Which of the folders that a run writes into, wherever its own is, has the least room now."""
    free = {folder: free_on_disk(folder) for folder in (Path.cwd(), Path(tempfile.gettempdir()))}
    folder = min(free, key=lambda one: free[one])
    return f" ({folder} has {free[folder] / 1e6:,.0f} MB left)"


def exit_code(error: Exception) -> int:
    """`WRONG_INPUT` where something given is at fault, see `DoubleflowError`."""
    return WRONG_INPUT if isinstance(cause_of(error), ValueError) else FAILED


def cause_of(error: Exception) -> Exception:
    """The error itself; of one that Ray brings from an actor, the one that was raised there."""
    if _is_one_of(error, ("ray.exceptions", "RayTaskError")):
        cause = getattr(error, "cause", error)
        return cause if isinstance(cause, Exception) else error
    return error


def _is_one_of(error: Exception, name: tuple[str, str]) -> bool:
    """An instance of a class of a module, which is not imported for it."""
    module, kind = name
    return module in sys.modules and isinstance(error, getattr(sys.modules[module], kind))


def quiet_console() -> None:
    """Prefect's console shows warnings, and not what `in_a_sentence` says at the end: a task failed, then its flow.

    That its server does not take events it says once, and not of each, with all of it.

    Its other handlers, which send a record to the flow run's page, keep it with its frames.
    """
    import prefect.main  # noqa: F401  sets the handlers up

    for handler in logging.getLogger().handlers:
        if type(handler).__name__ == "PrefectConsoleHandler":
            handler.setLevel(max(handler.level, logging.WARNING))
            handler.addFilter(is_no_end)
            handler.addFilter(FirstOfLostEvents())


ENDS = ("Encountered exception during", "Task run failed", "Crash detected!", "Finished in state")


def is_no_end(record: logging.LogRecord) -> bool:
    """Is it something else than a task's or a flow's last words?"""
    by_a_run = record.name.startswith(("prefect.flow_runs", "prefect.task_runs"))
    return not (by_a_run and record.levelno >= logging.ERROR and record.getMessage().startswith(ENDS))


def import_mlflow() -> None:
    """What every flow's records want: a second of one core, while a server's process has another."""
    mlflow.MlflowClient  # noqa: B018  its first use imports MLflow


def import_checks_and_records() -> None:
    """What the checks of a config import too, which is seconds."""
    import diffusers.models.autoencoders  # noqa: F401

    import models.families.stable_diffusion_3  # noqa: F401

    import_mlflow()


def run_flow(
    flow: Callable[..., Any],
    debug: bool,
    *arguments: Any,
    continues: bool = False,
    meanwhile: Callable[[], None] = import_checks_and_records,
    **named: Any,
) -> Any:
    """Call a flow, whose end `in_a_sentence` tells; a server that Prefect starts for it wants a secret, and ends with
    this process, also if that is killed before it has a cluster.

    Args:
        flow, arguments, named: what is called.
        debug: show everything.
        continues: a run that did not end well goes on by the same command, which is told.
        meanwhile: imports what comes next while that server starts.
    """
    guard_temporary_server()
    handle(raise_it)  # from now on there is something to end
    heed_hangup()
    with heartbeats(), watchdog() if TEMPORARY_SERVER in os.environ else nullcontext():
        start_temporary_server(meanwhile)
        if debug:
            return flow(*arguments, **named)
        quiet_console()
        say_at_once()
        try:
            return flow(*arguments, **named)
        except (Exception, KeyboardInterrupt, Stopped) as error:
            if continues and _has_begun(error):
                error.add_note(f"continue: {command_line()}")
            raise


def _has_begun(error: BaseException) -> bool:
    """Had a run begun that ended so? What is wrong with its input is said before; what code of the user's own gives
    back is not seen until a run asks it, and that goes on once the code is right."""
    wrong_answer = isinstance(error, Exception) and isinstance(cause_of(error), WrongAnswer)
    return last_words(error)[1] != WRONG_INPUT or wrong_answer


def command_line() -> str:
    """What was typed to start this process, from the same folder."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = sys.argv[:1] if spec is None else ["-m", spec.name]
    return shlex.join([beside_python("python"), *program, *sys.argv[1:]])
