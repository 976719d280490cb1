# SPDX-License-Identifier: Apache-2.0
"""Recipes are the deployments of prefect.yaml; this reads one, and what the command line changes of it.

It imports neither torch nor Prefect: what is wrong is known in the first second.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from textwrap import fill, indent
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tasks.config.added_rewards import why_added_by_mistake
from tasks.config.errors import NO_YAML, RecipeError, described, field_paths, near, section_of, why_no_yaml
from tasks.config.named_values import typed_value
from tasks.config.overrides import Entries, merged, set_fields
from tasks.config.tree import TrainConfig, TrainOverrides
from tasks.system.distinct_names import plain_json, plain_yaml

PREFECT_FILE = Path("prefect.yaml")
RECORD = frozenset({"mlflow_run_id", "config"})
"""What a run's run.json has, beside its name."""
Settings = TypeVar("Settings", bound=BaseModel)


def load_recipe(name: str, file: Path = PREFECT_FILE) -> TrainConfig:
    """The config of the train deployment called `name`.

    Raises:
        RecipeError: there is no such deployment, and the message lists those there are; or it is no config.
    """
    return validate_section(TrainConfig, load_parameters("train", name, file).get("config"), f"{file}, recipe {name}")


def load_parameters(flow: str, name: str, file: Path = PREFECT_FILE) -> Mapping[str, Any]:
    """The parameters of a deployment of flows/<flow>.py, unchecked.

    Raises:
        RecipeError: there is no such file or deployment.
    """
    there = {d.get("name"): d for d in _deployments(file) if str(d.get("entrypoint")).startswith(f"flows/{flow}.py:")}
    if name not in there:
        known = sorted(filter(None, there))
        raise RecipeError(f"{file} has no {flow} deployment {name!r}; it has {', '.join(known)}{near(name, known)}")
    return there[name].get("parameters") or {}


def work_pools(file: Path = PREFECT_FILE) -> set[str]:
    """The names of the work pools that the deployments run in. Raises RecipeError as `load_parameters`."""
    pools = [entry.get("work_pool") for entry in _deployments(file)]
    return {str(pool["name"]) for pool in pools if isinstance(pool, Mapping) and "name" in pool}


def _deployments(file: Path) -> list[Mapping[str, Any]]:
    # As `prefect deploy` reads it, for which 1e-3 is text: else an option would be another by a deployment.
    content = read_yaml(file, "run from the repository's root", plain_yaml)
    deployments = content.get("deployments") if isinstance(content, Mapping) else None
    if not isinstance(deployments, list) or not all(isinstance(entry, Mapping) for entry in deployments):
        raise RecipeError(f"{file} has no list `deployments`: it is no file of Prefect deployments")
    return deployments


def load_config(file: Path) -> TrainConfig:
    """A whole config as JSON or YAML, as a run records it: the config.json of its artifacts, or its folder's run.json.

    Raises:
        RecipeError: the file is missing, or is no config.
    """
    found = read_yaml(file, "give a run's config.json, or the run.json of its folder")
    is_record = isinstance(found, Mapping) and found.keys() >= RECORD
    return validate_section(TrainConfig, found["config"] if is_record else found, str(file))


def explain_fields(config: TrainConfig, word: str) -> str:
    """The fields that have `word` in their path or description: each with its value here, as --set takes it, and what
    it is. Those of a section that is null here come with their defaults; one that has none must be given.

    Raises:
        RecipeError: there is none.
    """
    fields = [found for found in _fields(config) if word.lower() in f"{found[0]} {found[2]}".lower()]
    if not fields:
        raise RecipeError(f"--fields: no field has {word!r:.100} in its name or description{near(word, _names())}")
    return "\n".join(f"{path}={value}\n{indent(fill(said, 110), '    ')}" for path, value, said in fields)


def _fields(section: BaseModel, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted path, value as JSON, description) of every field."""
    dumped = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), f"{path}{name}"
        entries = value if isinstance(value, Mapping) else {}
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{here}.")
        elif entries and all(isinstance(entry, BaseModel) for entry in entries.values()):
            for label, entry in entries.items():
                yield from _fields(entry, f"{here}.{label}.")
        else:
            yield here, json.dumps(dumped[name]), field.description or ""
            below = section_of(field.annotation)
            if value is None and below is not None:
                yield from _fields_of_none(below, here)


def _fields_of_none(section: type[BaseModel], path: str) -> Iterator[tuple[str, str, str]]:
    """The same of a section that is null, with the defaults that its fields have where it is given."""
    for name, field in section.model_fields.items():
        default, below = field.get_default(call_default_factory=True), section_of(field.annotation)
        value = "" if field.is_required() else json.dumps(default, default=str)
        said = "must be given with it" if field.is_required() else "this is its default"
        if not isinstance(default, BaseModel):
            yield f"{path}.{name}", value, f"{field.description or ''} ({path} is null: {said}.)"
        if below is not None:
            yield from _fields_of_none(below, f"{path}.{name}")


def _names() -> list[str]:
    """The fields' own names."""
    return [path.rpartition(".")[2] for path in field_paths(TrainConfig)]


def validate_section(section: type[Settings], values: Any, source: str) -> Settings:
    """The section of these values. Raises RecipeError, which names the source and every wrong field."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"{source}: {described(error, section)}") from error
    except ValueError as error:
        raise RecipeError(f"{source}: {error}") from error


def read_yaml(file: Path, advice: str, parse: Callable[[str], Any] = typed_value) -> Any:
    """What is in a YAML or JSON file. Raises RecipeError where there is none, with the advice.

    Args:
        parse: reads YAML; without it 1e-3 is a number, as in JSON and in a setting of the command line.
    """
    try:
        return plain_json(file.read_text()) if file.suffix == ".json" else deepcopy(_parsed(file.read_text(), parse))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise RecipeError(f"{file} cannot be read ({reason}): {advice}") from error
    except NO_YAML as error:
        raise RecipeError(f"{file} is neither YAML nor JSON: {why_no_yaml(error)}") from error


@lru_cache(maxsize=4)
def _parsed(text: str, parse: Callable[[str], Any]) -> Any:
    """What is in this YAML, not to be changed: PyYAML takes .04 s for the recipes.

    libyaml takes a seventh of that, but a text that is nested too deeply is the end of the process there.
    """
    return parse(text)


def parse_changes(settings: list[str], files: Sequence[Path] = (), recipe: TrainConfig | None = None) -> TrainOverrides:
    """`["trainer.seed=1", "reward.functions={ocr: {}}"]` as overrides; values are YAML.

    Args:
        settings: field.path=value, each.
        files: further overrides, each laid over those before it; a setting replaces what it names as well.
        recipe: what they change. Of its rewards and options, or the files', a setting such as
            reward.functions.ocr.num_workers=4 changes this field alone; without a recipe no more is known of them than
            the files say, and the others are gone.

    Raises:
        RecipeError: an item has no equals sign, names no field, or gives a field a value that it cannot have, or
            would add a reward by mistake; or a file cannot be read.
    """
    given = dict[str, Any]()
    for file in files:
        further = _overrides(read_yaml(file, "give a file of overrides"), str(file))
        given = merged(given, set_fields(further), TrainConfig)
    changes = parse_settings(settings, "--set")
    if recipe is not None:
        added = why_added_by_mistake(changes, given.get("reward", {}).get("functions", recipe.rewards()))
        if added is not None:
            raise RecipeError(f"--set {added}")
        changes = recipe.completed(changes, given)
    return _overrides(merged(given, changes, TrainConfig), "--set")


def changed_recipe(name: str, settings: Sequence[str], file: Path = PREFECT_FILE) -> TrainConfig:
    """The recipe as a command with these settings, field.path=value each, would train it.

    Raises:
        RecipeError: there is no such recipe, or a setting is none.
        ConfigError: the result is no config.
    """
    recipe = load_recipe(name, file)
    return recipe.with_changes(parse_changes([*settings], recipe=recipe))


def _overrides(tree: Any, source: str) -> TrainOverrides:
    # The form's classes have names of their own; a message is about the config's fields.
    try:
        return TrainOverrides.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(f"{source}: {described(error, TrainConfig)}") from error


def parse_settings(settings: list[str], option: str) -> dict[str, Any]:
    """`["a.b=1"]` as {"a": {"b": 1}}, where a is `Entries`; 1e-3 is a number. Raises RecipeError, which names the
    option."""
    tree: dict[str, Any] = Entries()
    sections = dict[tuple[str, ...], str]()  # to the setting that named a part of it
    for setting in settings:
        path, equals, value = setting.partition("=")
        *parents, leaf = path.strip().split(".")
        if not equals or not all([*parents, leaf]):
            raise RecipeError(f"{option} {setting!r:.200} must have the form field.path=value")
        node: Any = tree
        for parent in parents:
            node = node.setdefault(parent, Entries())
            if not isinstance(node, dict):
                raise RecipeError(
                    f"{option} {setting!r:.200}: {parent} is set to {node!r:.100} as well, which has no parts"
                )
        if (*parents, leaf) in sections:
            raise RecipeError(
                f"{option} {setting!r:.100} would undo {sections[*parents, leaf]!r:.100} before it: give the section "
                "first, or all of it at once"
            )
        sections |= {tuple(parents[: depth + 1]): setting for depth in range(len(parents))}
        try:
            node[leaf] = typed_value(value)
        except NO_YAML as error:
            raise RecipeError(f"{option} {setting!r:.100}: the value is not YAML: {why_no_yaml(error)}") from error
    return tree
