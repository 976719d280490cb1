"""Recipes are the deployments of prefect.yaml; this runs one without a server of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from flows.config import TrainConfig, TrainOverrides

PREFECT_FILE = Path("prefect.yaml")


class RecipeError(ValueError):
    """A recipe cannot be used."""


def load_recipe(name: str, file: Path = PREFECT_FILE) -> TrainConfig:
    """The config of the train deployment called `name`.

    Raises:
        RecipeError: there is no such deployment; the message lists those there are.
    """
    deployments = yaml.safe_load(file.read_text())["deployments"]
    recipes = {d["name"]: d for d in deployments if d["entrypoint"].startswith("flows/train.py:")}
    if name not in recipes:
        raise RecipeError(f"{file} has no train deployment {name!r}; it has {', '.join(sorted(recipes))}")
    return TrainConfig.model_validate(recipes[name]["parameters"]["config"])


def parse_changes(settings: list[str]) -> TrainOverrides:
    """`["trainer.seed=1", "reward.functions={ocr: {}}"]` as overrides; values are YAML.

    Raises:
        RecipeError: an item has no equals sign.
    """
    tree: dict[str, Any] = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting!r} must have the form field.path=value")
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = yaml.safe_load(value)
    return TrainOverrides.model_validate(tree)


Recipe = Annotated[str, typer.Argument(help="A train deployment of prefect.yaml.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A whole config as JSON, as a run records it, in a recipe's place.")
]
Changes = Annotated[list[str] | None, typer.Option("--set", help="field.path=value; may be repeated.")]


def train_command(train: Callable[..., dict[str, Any]]) -> None:
    """`python -m flows.train [RECIPE] [--config FILE] [--set field=value ...]`."""

    def main(recipe: Recipe = "quickstart", config: ConfigFile = None, changes: Changes = None) -> None:
        """Train a recipe here and now, and print where the results are."""
        from flows.access import guard_temporary_server
        from flows.summary import Summary

        guard_temporary_server()
        chosen = (
            load_recipe(recipe) if config is None else TrainConfig.model_validate(yaml.safe_load(config.read_text()))
        )
        summary = Summary(**train(chosen, parse_changes(changes or [])))
        typer.echo(f"\n{summary.text()}\n")

    typer.run(main)


def validate_command(validate: Callable[..., dict[str, float]]) -> None:
    """`python -m flows.validate [RECIPE] [--weights FOLDER] [--set field=value ...]`."""

    def main(
        recipe: Recipe = "quickstart",
        weights: Annotated[Path | None, typer.Option(help="Folder that a run exported; else the base model.")] = None,
        changes: Changes = None,
    ) -> None:
        """Measure one set of weights on the held-out prompts."""
        from flows.access import guard_temporary_server

        guard_temporary_server()
        for name, value in sorted(validate(load_recipe(recipe), weights, parse_changes(changes or [])).items()):
            typer.echo(f"{name:32} {value:.4f}")

    typer.run(main)
