# SPDX-License-Identifier: Apache-2.0
"""How an error ends a command: in one sentence, with 2 for wrong input and 1 for a run that failed."""

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from models.errors import DoubleflowError
from tasks.config.errors import described

WRONG_INPUT, FAILED = 2, 1
Debug = Annotated[bool, typer.Option("--debug", help="Show an error's whole traceback.")]


def run_command(main: Callable[..., None]) -> None:
    """Run a function as a command with its arguments from the command line; it does not return."""
    command_of(main)()


def command_of(main: Callable[..., None]) -> typer.Typer:
    """The same as an object that can be called with other arguments."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    return app


class Commands(TyperGroup):
    """Sub-commands whose errors are `in_a_sentence`; `--debug`, an option of the group, stands before the command."""

    def invoke(self, ctx: Any) -> Any:
        """Of one sub-command."""
        with in_a_sentence(ctx.params.get("debug", False)):
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
def in_a_sentence(debug: bool = False) -> Iterator[None]:
    """An error of the block that was raised for the user ends the command with its message alone.

    Any other error is a defect, and has its traceback: once, Prefect's logger does not show it too.
    """
    if debug:
        yield
        return
    try:
        yield
    except Exception as error:
        said = sentence(error)
        if said is None:
            raise
        typer.echo(f"error: {said}", err=True)
        raise typer.Exit(exit_code(error)) from None


def sentence(error: Exception) -> str | None:
    """What the user is told; None for an error that was not raised to be read by one."""
    told = cause_of(error)
    if isinstance(told, ValidationError):
        from tasks.config.tree import TrainConfig

        return described(told, TrainConfig)
    if isinstance(told, DoubleflowError) or _is_one_of(told, ("prefect.exceptions", "FailedRun")):
        return str(told)
    if _is_one_of(told, ("mlflow.exceptions", "MlflowException")):
        return f"MLflow: {' '.join(str(told).split())}"
    return None


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


def one_line_logs() -> None:
    """Prefect's console shows what failed without the frames, which `in_a_sentence` shows where they matter.

    Its other handlers, which send the record to the flow run's page, keep them.
    """
    import prefect.main  # noqa: F401  sets the handlers up

    for handler in logging.getLogger().handlers:
        if type(handler).__name__ == "PrefectConsoleHandler":
            handler.setFormatter(WithoutFrames(handler.formatter))


class WithoutFrames(logging.Formatter):
    """Another formatter's line, without the traceback that would follow it."""

    def __init__(self, formatter: logging.Formatter | None):
        super().__init__()
        self.formatter = formatter or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        """One line; the record itself stays whole for the other handlers."""
        short = copy.copy(record)
        short.exc_info = short.exc_text = short.stack_info = None
        return self.formatter.format(short).splitlines()[0] if record.exc_info else self.formatter.format(short)


def started(flow: Callable[..., Any], debug: bool, *arguments: Any, **named: Any) -> Any:
    """Call a flow, with its errors in one line of Prefect's log; a server that Prefect starts for it wants a secret."""
    from flows.deploy.access import guard_temporary_server  # here: a wrong command is answered before Prefect is there
    from flows.deploy.heartbeats import send_heartbeats

    guard_temporary_server()
    send_heartbeats()
    if not debug:
        one_line_logs()
    return flow(*arguments, **named)
