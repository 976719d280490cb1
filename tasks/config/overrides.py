# SPDX-License-Identifier: Apache-2.0
"""Changes laid over a config, and the form of a section in which every field may be left out."""

import copy
from collections.abc import Iterable, Mapping
from itertools import chain
from types import NoneType
from typing import Annotated, Any, TypeAlias, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    create_model,
    field_validator,
    model_serializer,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema

from models.config.bounds import check_given
from tasks.config.errors import ConfigError, section_of, type_below

DEEPEST = 40
"""Mappings inside one another: the tree has six, options of its own below them up to twenty more."""


def set_fields(values: Any, deepest: int = DEEPEST) -> Any:
    """Input of a config as plain mappings of the fields that were set.

    Raises:
        ConfigError: mappings are nested without end, as a YAML alias of itself is.
    """
    if isinstance(values, BaseModel):
        return values.model_dump(exclude_unset=True)
    if isinstance(values, Mapping):
        if deepest == 0:
            raise ConfigError(
                f"the settings are nested more than {DEEPEST} levels deep, and no section is: look for "
                "an alias that holds itself"
            )
        return {name: set_fields(value, deepest - 1) for name, value in values.items()}
    return values


class Entries(dict[str, Any]):
    """A mapping that dotted paths to its entries have made: it says nothing of those that it does not name."""


def merged(base: dict[str, Any], changes: dict[str, Any], kind: Any) -> dict[str, Any]:
    """`base` with `changes` laid over it, section by section.

    A field that is no section is replaced as a whole: also a mapping of free names, as a reward's options are, or
    `reward.functions`. Of `Entries` those that they name alone.

    Args:
        base, changes: fields of a section, nested.
        kind: that section, or the type of a mapping.
    """
    result = dict(base)
    for name, value in changes.items():
        below = type_below(kind, name)
        laid_over = isinstance(value, Entries) or section_of(below) is not None
        nested = laid_over and isinstance(value, dict) and isinstance(base.get(name), dict)
        result[name] = merged(base[name], value, below) if nested else value
    return result


def whole(changes: dict[str, Any], base: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The changes, in which a mapping of free names of which they name entries alone has those of `base` as well: for
    `merged`, also after a check that takes `Entries` for any mapping."""
    result = dict[str, Any]()
    for name, value in changes.items():
        below, before = type_below(kind, name), base.get(name)
        if isinstance(value, dict) and section_of(below) is not None:
            result[name] = whole(value, before if isinstance(before, dict) else {}, below)
        else:
            result[name] = merged({name: before}, {name: value}, kind)[name]
    return result


def without(tree: Mapping[str, Any], paths: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tree without what is at these dotted paths or below them, and that: dotted path of a value -> the value."""
    kept, taken = copy.deepcopy(dict(tree)), dict[str, Any]()
    for path in paths:
        *parents, leaf = path.split(".")
        node: Any = kept
        for parent in parents:
            node = node.get(parent, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict) and leaf in node:
            taken |= flat(node.pop(leaf), path)
    return kept, taken


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; at "x", {"x.a.b": 1}."""
    if not isinstance(value, Mapping):
        return {path: value}
    below = f"{path}." if path else ""
    return {name: entry for key, part in value.items() for name, entry in flat(part, f"{below}{key}").items()}


class Form(BaseModel):
    """What all forms refuse: misspelt fields, and what is no number where a number should be."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_was_given(cls, value: Any, info: ValidationInfo) -> Any:
        return check_given(value, cls.model_fields[str(info.field_name)].annotation)

    @model_serializer(mode="plain")
    def _only_what_was_set(self) -> dict[str, Any]:
        """Also as the default of a parameter, which a form begins with: nothing is set there."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


class FormOf:
    """A mark on a parameter of a flow: its form is that of another class.

    Prefect's form sends the default of every field that nobody has touched, as if it had been chosen: a config's then
    go before those that its algorithm's name stands for. In the form of an `optional` section fields have none.
    """

    def __init__(self, shown: type[BaseModel]):
        self.shown = shown

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self.shown.__pydantic_core_schema__)


NoChange: TypeAlias = SkipJsonSchema[None]
"""Null for changes, which a form does not offer: beside it Prefect's would tell of a wrong value at no field."""


def left_out(info: FieldInfo) -> tuple[Any, FieldInfo]:
    """A field as `info` has it, that may be left out; null is one of its values only where it was before.

    A form then shows the field itself, and not "None" with a choice of types.
    """
    bounded: Any = info.annotation
    for constraint in info.metadata:
        bounded = Annotated[bounded, constraint]

    def without_default(schema: dict[str, Any]) -> None:
        schema.pop("default", None)
        if callable(info.json_schema_extra):
            info.json_schema_extra(schema)
        _offer_truth(schema)
        _keep_type(schema)

    field = Field(default=None, description=info.description, json_schema_extra=without_default)
    return bounded, cast(FieldInfo, field)


PLAIN_TYPES = ("integer", "number")
TRUTH = [True, False]


def _offer_truth(schema: dict[str, Any]) -> None:
    """Have a form offer true and false, and choose neither.

    Of a boolean Prefect's form sends false where nobody has touched it, and a run would have all of them off. What has
    values and no type it leaves out until one is chosen.
    """
    counted = [_values(choice) for choice in schema.get("anyOf", [schema])]
    if all(counted) and TRUTH in counted:
        for name in ("type", "anyOf"):
            schema.pop(name, None)
        schema["enum"] = [*chain(*counted)]


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """What a schema lets through, where that can be counted."""
    return TRUTH if schema.get("type") == "boolean" else [schema["const"]] if "const" in schema else []


def _keep_type(schema: dict[str, Any]) -> None:
    """Put a plain type one level down, where Prefect leaves it as it is.

    Of the type of a field without a default it makes that or null, which no field here is; and of a value that is
    neither it says no more than that, where of one type it says which.
    """
    if schema.get("type") in PLAIN_TYPES:
        told = {name: schema.pop(name) for name in [*schema] if name not in ("title", "description")}
        schema["allOf"] = [told]


def _with_section_left_out(info: FieldInfo) -> FieldInfo:
    """Of a section that may be null, its fields too may be left out: Prefect's form begins to fill it in, and what is
    only begun is refused."""
    kinds = get_args(info.annotation)
    section = kinds[0] if len(kinds) == 2 and kinds[1] is NoneType else None
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        return info
    found = copy.copy(info)
    found.annotation = cast(Any, optional(section) | None)
    return found


def optional(section: type[BaseModel]) -> type[BaseModel]:
    """The same section with every field optional: descriptions and bounds stay, cross-checks wait for the merge."""
    fields: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            below = optional(info.annotation)
            fields[name] = (below, Field(default_factory=below, description=info.description))
        else:
            fields[name] = left_out(_with_section_left_out(info))
    return create_model(f"{section.__name__}Override", __base__=Form, __doc__=section.__doc__, **fields)
