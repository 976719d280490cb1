# SPDX-License-Identifier: Apache-2.0
"""What names a run: the settings that shape its weights, and none of the others; and no younger setting renames it."""

import functools
import operator
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from models.config.section import Later, Mark, NotShaping, Section
from tasks.config.identity import shaping
from tasks.config.overrides import merged
from tasks.config.tree import TrainConfig

RECORDED = yaml.safe_load((Path(__file__).parent / "recorded_runs.yaml").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_config_has_the_digest_that_is_in_its_runs_name(name: str) -> None:
    """Of the release before the marks, whose list of names stood in one place: no run of it is another run now."""
    whole = merged(RECORDED["defaults"]["config"], RECORDED[name]["config"], TrainConfig)
    assert TrainConfig.model_validate(whole).digest() == RECORDED[name]["digest"]


def leaves(
    section: BaseModel, path: tuple[str, ...] = (), marked: bool = False
) -> Iterator[tuple[str, FieldInfo, bool]]:
    """Dotted path, field and "is it, or a section around it, marked" of every setting below a section."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        marks = marked or Mark.NOT_SHAPING in field.metadata
        if isinstance(value, dict) and value and all(isinstance(entry, BaseModel) for entry in value.values()):
            for key, entry in value.items():
                yield from leaves(entry, (*path, name, key), marks)
        elif isinstance(value, BaseModel):
            yield from leaves(value, (*path, name), marks)
        else:
            yield ".".join((*path, name)), field, marks


def another(value: Any) -> Any:
    """A value of the same kind that differs."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case PurePath():
            return value / "x"
        case tuple():
            return (*value, 7)
        case list():
            return [*value, "x"]
        case dict():
            return value | {"x": 1}
        case None:
            return 7
    raise AssertionError(f"no other value for {value!r}")


def replaced(section: BaseModel, path: list[str]) -> Any:
    """The section with another value at the path, unchecked: fields that must agree could not be tried one by one."""
    name, *rest = path
    value = getattr(section, name)
    if not rest:
        value = another(value)
    elif isinstance(value, dict):
        value = value | {rest[0]: replaced(value[rest[0]], rest[1:])}
    else:
        value = replaced(value, rest)
    return section.model_copy(update={name: value})


def test_every_field_without_a_mark_is_in_the_name_and_none_with_one() -> None:
    base = TrainConfig.model_validate({"reward": {"reward_model": {"model_path": "judge"}}})  # null by default
    found = list(leaves(base))
    assert {marked for *_, marked in found} == {True, False}
    assert "reward.reward_model.model_path" in {path for path, *_ in found}
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a Literal's other value is not of its type
        for path, _, marked in found:
            if (replaced(base, path.split(".")).digest() == base.digest()) != marked:
                wrong.append(path)
    assert wrong == []
    assert len(found) > 100


def test_a_younger_setting_renames_a_run_only_where_it_is_used() -> None:
    class Inner(Section):
        form: Literal["a", "b"] = "a"

    class Before(Section):
        lr: float = 0.1
        threads: NotShaping[int] = 1

    class After(Before):
        skip: Later[bool] = Field(False, description="Younger than the first runs.")
        inner: Later[Inner] = Field(default_factory=Inner)

    assert shaping(After()) == shaping(Before()) == {"lr": 0.1}
    assert shaping(After(skip=False, threads=3)) == shaping(Before())
    assert shaping(After(skip=True)) == {"lr": 0.1, "skip": True}
    assert shaping(After(inner=Inner(form="b"))) == {"lr": 0.1, "inner": {"form": "b"}}


def test_marks_are_in_no_form() -> None:
    """Prefect shows a field's schema, bounds and description; a mark adds nothing and takes nothing away."""
    plain = create_model("Form", workers=(Annotated[int, Field(ge=1, description="Some.")], 1))
    marked = create_model("Form", workers=(NotShaping[int], Field(1, ge=1, description="Some.")))
    assert marked.model_json_schema() == plain.model_json_schema()
    schema = TrainConfig.model_json_schema()
    steps = functools.reduce(operator.getitem, ("$defs", "TrainerConfig", "properties", "test_freq"), schema)
    assert steps["minimum"] == 0
    assert steps["description"].startswith("Iterations between validations")
