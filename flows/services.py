# SPDX-License-Identifier: Apache-2.0
"""What one machine needs to run deployments: `python -m flows.services up`, `run`, `status`, `down`.

Up starts a Prefect server, MLflow and a worker, and makes the work pool, the GPU limit, the deployments and the
automations. The servers want a secret that is made here. It is in .services/, which only its owner can read, with the
processes' pids and logs; down ends them and removes it. Databases and results stay. Run starts what is not up, and a
recipe as its deployment, which it shows until its end.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from flows.deploy.bring_up import POOL_NAME, PORTS, RUNS, SERVICES, addresses, bring_up, ports_for, use
from flows.deploy.flow_runs import end_worker_flow_runs
from flows.deploy.service_processes import end_leftovers, end_process
from flows.deploy.service_record import (
    ENVIRONMENT,
    HERE,
    hold_services,
    living_processes,
    recorded_processes,
    write_record,
)
from flows.deploy.stages_beside import stages_beside
from models.config.bounds import MOST_GPUS, MOST_PROCESSES
from tasks.cli.stopping import Stopped
from tasks.cli.terminal import command_line, commands
from tasks.config.errors import ConfigError
from tasks.config.recipes import PREFECT_FILE, load_recipe, parse_changes, work_pools
from tasks.run.early import check_early
from tasks.system.access import USER, exports

Errors = type[BaseException] | tuple[type[BaseException], ...]
SIGNALS = KeyboardInterrupt, Stopped
MOST_PORT = 65535

app = commands("Servers and a worker on this machine.")


@app.command()
def up(
    prefect_port: Annotated[int, typer.Option(min=1, max=MOST_PORT, help="Port of Prefect's server.")] = PORTS[
        "prefect"
    ],
    mlflow_port: Annotated[int, typer.Option(min=1, max=MOST_PORT, help="Port of MLflow's server.")] = PORTS["mlflow"],
    pool: Annotated[
        str | None,
        typer.Option(help=f"Work pool that the deployments name; left out, what is up has it, or {POOL_NAME}."),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_PROCESSES,
            help=f"Flow runs that the pool lets run at once; left out, as many as before, or {RUNS}.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0, max=MOST_GPUS, help="GPUs of this machine; left out, as many as before, or as torch finds."
        ),
    ] = None,
) -> None:
    """Start what is not up yet; if a part does not start, nothing of what this began stays."""
    there = living_processes()
    if prefect_port == mlflow_port:
        raise ConfigError(f"--prefect-port and --mlflow-port are both {mlflow_port}: each server needs one of its own")
    if pool is not None or not there:
        _check_pool(pool or POOL_NAME)
    environment = bring_up({"prefect": prefect_port, "mlflow": mlflow_port}, pool, runs, gpus)
    typer.echo(f"{'already up' if there.keys() >= SERVICES else 'up'}: {addresses(environment)}")
    typer.echo(f"Prefect's page asks for PREFECT_API_AUTH_STRING, MLflow's for {USER} and MLFLOW_TRACKING_PASSWORD.")
    typer.echo(f"For another terminal, `. {ENVIRONMENT}` or:\n{exports(environment)}", nl=False)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A train deployment of prefect.yaml; an error lists them.")],
    stages: Annotated[
        Path | None, typer.Option(help="A dvc.yaml whose stages are brought up to date first, beside the start.")
    ] = None,
    overrides: Annotated[
        list[Path] | None,
        typer.Option(
            help="Changes in a file, as a deployment takes them; of several a later one goes first, --set before all."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="field.path=value; may be repeated. `flows.train --fields` explains."),
    ] = None,
) -> None:
    """Start what is not up yet, run a recipe as its deployment, and print what it learnt; the servers stay.

    A run that fails leaves them, too: its logs are on its page. So does one that Prefect's server says nothing of for
    minutes: it goes on. A signal cancels it. After that, or where a stage or a server fails, what this began ends.
    """
    there = living_processes()
    parameters = _checked_parameters(recipe, overrides, changes, stages, joins="worker" not in there)
    with _ended_with_an_error(there, but=Exception):  # from the run's creation on: it goes on without being followed
        with _ended_with_an_error(there), stages_beside(stages) as making:
            environment = use(recipe) if there.keys() >= SERVICES else bring_up(ports_for(there), check=making.check)
            making.wait()
            from flows.deploy.deployed_run import check_completed, follow, result_of, start_run

            with _with_note(f"continue: {command_line()}"):
                started = start_run(f"train/{recipe}", parameters)
        stay = f"still up: {addresses(environment)}; secrets in {ENVIRONMENT}; `make down` ends them"
        with _with_note(f"continue: {command_line()}", SIGNALS), _with_note(stay, Exception):
            ended = follow(started)
    with _with_note(stay):
        check_completed(ended)
    from tasks.run.summary import Summary

    typer.echo(f"\n{Summary(**result_of(ended)).text()}\n\n  {stay}\n")


def _check_pool(name: str) -> None:
    """Raises ConfigError for a pool in which no deployment runs; with the servers up, deploying would fail."""
    if name not in (pools := work_pools()):
        raise ConfigError(
            f"--pool is {name!r}, but the deployments of {PREFECT_FILE} name {', '.join(sorted(pools))}: give that, or "
            "change their work_pool"
        )


def _checked_parameters(
    recipe: str, overrides: list[Path] | None, changes: list[str] | None, stages: Path | None, joins: bool
) -> dict[str, Any]:
    """The deployment's parameters, which are right as far as can be said before anything is started.

    Args:
        recipe, overrides, changes, stages: as `run` takes them.
        joins: the run joins the cluster at this process's RAY_ADDRESS; where a worker is up already, that at the
            worker's.
    """
    config = load_recipe(recipe)
    changed = parse_changes(changes or [], overrides or [], config)
    if stages is not None and not stages.is_file():
        raise ConfigError(f"--stages is {stages}, which is no file: give a dvc.yaml")
    check_early(config.with_changes(changed), made=stages is None, cluster=joins, tracked=False)
    given = changed.model_dump(mode="json", exclude_unset=True)
    return {"overrides": given} if given else {}


@contextmanager
def _ended_with_an_error(there: Mapping[str, psutil.Process], but: Errors = ()) -> Iterator[None]:
    """Where the block fails, by anything `but` these, all ends that it has started; what was `there` before stays."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, but) and not there and living_processes():
            typer.echo("ending the servers ...", err=True)
            with suppress(typer.Exit):  # `down` has said what is missing; why the block failed is to be the last word
                down()
        raise


@contextmanager
def _with_note(note: str, of: Errors = BaseException) -> Iterator[None]:
    """What ends the block says this, too, if it is one of these."""
    try:
        yield
    except of as error:
        error.add_note(note)
        raise


@app.command()
def status() -> None:
    """Which of the processes are alive; exit code 1 if one is not, or none was started."""
    recorded = recorded_processes()
    if not recorded:
        typer.echo("nothing was started here: `python -m flows.services up` does")
    for name, process in recorded.items():
        state = "up" if process.alive else f"gone, see {HERE / f'{name}.log'}"
        typer.echo(f"{name:10} pid {process.pid:<8} {state}")
    raise typer.Exit(0 if recorded and all(process.alive for process in recorded.values()) else 1)


@app.command()
def down() -> None:
    """End the processes and all that they started, the flow runs and the worker first; exit code 1 if one is missing.

    The flow runs are Crashed then, and their MLflow runs KILLED or FAILED: the servers hear of it before they end.
    The record of a process that was not found stays: it has ended by itself, or is in another container or machine.
    """
    if not HERE.is_dir():
        return
    with hold_services():
        recorded, living = recorded_processes(), living_processes()
        end_worker_flow_runs(living.get("worker"))
        for process in reversed(living.values()):
            end_process(process)
        found = living.keys() | end_leftovers()
        missing = {name: entry for name, entry in recorded.items() if name not in found and not entry.ended}
        if not missing:
            shutil.rmtree(HERE)
            return
        write_record(missing)
        for name, entry in missing.items():
            typer.echo(f"{name} (pid {entry.pid} on {entry.host}) was not found: has it ended by itself?", err=True)
        typer.echo(
            f"Their record and logs stay in {HERE}/. If they run in another container or on that machine, run `down` "
            f"there; else remove the folder, or the next `up` does.",
            err=True,
        )
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
