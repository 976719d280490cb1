# SPDX-License-Identifier: Apache-2.0
"""The commands `python -m flows.train`, `validate`, `sweep`, `reproduce`, `compare` and `report`.

A module that holds a flow calls its command before its own imports, which take seconds. The command checks what it
was given with pydantic and YAML alone (`tasks.config.recipes`, `tasks.run.early`), and has the flow imported once that
is right.
"""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from models.config.exported import check_holds_weights
from tasks.cli.terminal import Debug, import_mlflow, in_a_sentence, run_command, run_flow
from tasks.config.errors import ConfigError, RecipeError
from tasks.config.recipes import (
    explain_fields,
    load_config,
    load_parameters,
    load_recipe,
    parse_changes,
    parse_settings,
    read_yaml,
    validate_section,
)
from tasks.config.sweep import SweepConfig, check_fields, with_search
from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig, TrainOverrides
from tasks.run.early import as_config_errors, check_early, check_folder, check_tracking

QUICKSTART = "quickstart"
Recipe = Annotated[
    str | None,
    typer.Argument(help="A train deployment of prefect.yaml; an error lists them.", show_default=QUICKSTART),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="A whole config as JSON or YAML, as a run records it, in a recipe's place."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="field.path=value; may be repeated. `flows.train --fields` explains."),
]
Machine = Annotated[
    list[Path] | None,
    typer.Option(
        "--overrides",
        help="Changes in a file, as a deployment takes them; a later file overrides an earlier one, --set all files.",
    ),
]
Run = Annotated[str, typer.Argument(help="A run's name, its folder, or its MLflow run id.")]
RUNS = Path("runs")
Folder = Annotated[Path, typer.Option(help="The folder with the runs' own.")]
Tracking = Annotated[str | None, typer.Option(help="MLflow's URI; else MLFLOW_TRACKING_URI, or mlflow.db.")]


def flow_of(command: str) -> Callable[..., Any]:
    """The flow that a command starts, or of `report` the function: `flows.<command>` has it by the same name.

    It is found by that name, as Prefect finds a deployment's by its entry point: no room of this floor knows a flow.
    """
    return getattr(importlib.import_module(f"flows.{command}"), command)


def _given(
    recipe: str | None, file: Path | None, changes: list[str] | None, overrides: list[Path] | None
) -> tuple[TrainConfig, TrainOverrides]:
    """The config and its changes. Raises RecipeError where a recipe and a file are both given, or one is wrong."""
    if recipe is not None and file is not None:
        raise RecipeError(f"the recipe {recipe} and --config {file} are both given, each a whole config: give one")
    config = load_recipe(recipe or QUICKSTART) if file is None else load_config(file)
    return config, parse_changes(changes or [], overrides or [], config)


def _chosen(*given: Any, trains: bool) -> tuple[TrainConfig, TrainOverrides]:
    """The same as `_given`, which together are right as far as can be said early."""
    config, changed = _given(*given)
    check_early(config.with_changes(changed), trains)
    return config, changed


def train(
    recipe: Recipe = None,
    config: ConfigFile = None,
    overrides: Machine = None,
    changes: Changes = None,
    fields: Annotated[
        str | None,
        typer.Option(help="Explain the fields that have this word in their name or description, and end; . for all."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a recipe here and now, and print where the results are."""
    with in_a_sentence(debug):
        if fields is not None:
            shown, changed = _given(recipe, config, changes, overrides)
            typer.echo(explain_fields(shown.with_changes(changed), fields))
            return
        chosen, changed = _chosen(recipe, config, changes, overrides, trains=True)
        from tasks.run.summary import Summary

        summary = Summary(**run_flow(flow_of("train"), debug, config=chosen, overrides=changed, continues=True))
        typer.echo(f"\n{summary.text()}\n")


def validate(
    recipe: Recipe = None,
    config: ConfigFile = None,
    weights: Annotated[Path | None, typer.Option(help="Folder that a run exported; else the base model.")] = None,
    overrides: Machine = None,
    changes: Changes = None,
    debug: Debug = False,
) -> None:
    """Measure one set of weights on the held-out prompts."""
    with in_a_sentence(debug):
        chosen, changed = _chosen(recipe, config, changes, overrides, trains=False)
        if weights is not None:
            if not weights.is_dir():
                raise ConfigError(f"--weights is {weights}, which is not a folder: give one that a run exported")
            with as_config_errors():
                check_holds_weights(weights, f"--weights is {weights}")

        for name, value in sorted(run_flow(flow_of("validate"), debug, chosen, weights, changed).items()):
            typer.echo(f"{name:32} {value:.4f}")


def sweep(
    deployment: Annotated[str, typer.Argument(help="A sweep deployment of prefect.yaml.")] = "sweep",
    search: Annotated[
        list[str] | None, typer.Option("--search", help="field=value of what is searched; may be repeated.")
    ] = None,
    overrides: Machine = None,
    changes: Changes = None,
    debug: Debug = False,
) -> None:
    """Train with many settings, and print the best."""
    with in_a_sentence(debug):
        given, source = load_parameters("sweep", deployment), f"prefect.yaml, deployment {deployment}"
        config = validate_section(TrainConfig, given.get("config"), source)
        searched = validate_section(SweepConfig, given.get("search"), source)
        searching, lost = with_search(searched, parse_settings(search or [], "--search"))
        searches = validate_section(SweepConfig, searching, "--search")
        shared = parse_changes(changes or [], overrides or [], config)
        changed = config.with_changes(shared)
        check_early(changed)
        check_fields(changed, searches)
        if lost:
            fields = ", ".join(f"{path} {value}" for path, value in lost.items())
            typer.echo(f"warning: search.space is replaced as a whole: without the deployment's {fields}", err=True)

        for name, value in run_flow(flow_of("sweep"), debug, config, searches, shared, continues=True).items():
            typer.echo(f"{name:16} {value}")


def reproduce(
    run: Run,
    iterations: Annotated[int, typer.Option(min=1, help="How many of the run's first iterations.")] = 3,
    tolerance: Annotated[float, typer.Option(min=0, help="Largest difference of a metric.")] = 1e-5,
    folder: Folder = RUNS,
    tracking: Tracking = None,
    debug: Debug = False,
) -> None:
    """Do a recorded run's first iterations again, from its commit and its data, and compare."""
    with in_a_sentence(debug):
        found, _, tracking = _found(run, folder, tracking)
        place = _recorded(tracking, found)

        state = run_flow(flow_of("reproduce"), debug, found, iterations, tolerance, place, return_state=True)
        if not state.is_completed():
            state.result()  # raises
        typer.echo(state.message)


def compare(
    run: Run,
    against: Run,
    folder: Annotated[Path, typer.Option(help="Where the page is written, and runs' own folders are.")] = RUNS,
    tracking: Tracking = None,
    debug: Debug = False,
) -> None:
    """Write a page that compares two recorded runs, and print its path."""
    with in_a_sentence(debug):
        check_folder(folder, "--folder")
        first, _, tracking = _found(run, folder, tracking)
        second, _, tracking = _found(against, folder, tracking)
        place = _recorded(tracking, first, second)

        typer.echo(run_flow(flow_of("compare"), debug, first, second, place, folder, meanwhile=import_mlflow))


def report(
    run: Run,
    folder: Folder = RUNS,
    tracking: Tracking = None,
    debug: Debug = False,
) -> None:
    """Write a recorded run's page anew, and print its path."""
    with in_a_sentence(debug):
        found, own, tracking = _found(run, folder, tracking)
        place = _recorded(tracking, found)
        from tasks.records.history import RunHistory
        from tasks.records.tracking import mlflow_client

        typer.echo(flow_of("report")(RunHistory(mlflow_client(place), found), own, folder))


def _found(run: str, runs: Path, tracking: str | None) -> tuple[str, Path | None, str | None]:
    """A recorded run by its name, its folder or its MLflow run id: the id, the folder if it was named by that, and
    MLflow's URI as far as that is known.

    Args:
        run: which.
        runs: the folder in which runs' names are looked for.
        tracking: MLflow's URI, where it is given.
    """
    own = next((place for place in (Path(run), runs / run) if (place / "run.json").is_file()), None)
    if own is None:
        return run, None, tracking
    found, uri = _of_folder(own)
    return found, own, tracking or os.environ.get("MLFLOW_TRACKING_URI") or uri


def _of_folder(folder: Path) -> tuple[str, str]:
    """(MLflow run id, MLflow's URI) of a run's folder. Raises RecipeError where its record does not say them."""
    record = read_yaml(folder / "run.json", "give the MLflow run id")
    try:
        found, uri = record["mlflow_run_id"], record["config"]["tracking"]["uri"]
    except (KeyError, TypeError):
        found = uri = None
    if found is None:  # null says that it is to go on in a new one
        raise RecipeError(f"{folder / 'run.json'} does not name an MLflow run: give the MLflow run id")
    return str(found), str(uri)


def _recorded(tracking: str | None, *runs: str) -> TrackingConfig:
    """Where MLflow is, and has these runs. Raises ConfigError where it has one of them not, and what a run's config
    raises, such as NoTrainingConfig."""
    place = TrackingConfig() if tracking is None else validate_section(TrackingConfig, {"uri": tracking}, "--tracking")
    if tracking is not None:
        os.environ["MLFLOW_TRACKING_URI"] = tracking  # which goes before the config's
    check_tracking(place.address)
    from tasks.records.history import RunHistory, RunUnknown
    from tasks.records.tracking import mlflow_client

    try:
        for run in runs:
            RunHistory(mlflow_client(place), run).config()
    except RunUnknown as error:
        raise ConfigError(f"{error}: give a run's name, its folder, or its MLflow run id") from error
    return place


def main(command: str) -> None:
    """Run one of the commands with the arguments of this process, and end it."""
    run_command({f.__name__: f for f in (train, validate, sweep, reproduce, compare, report)}[command])
