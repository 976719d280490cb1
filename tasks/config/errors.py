# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the settings, in a sentence: which field of which file, what it is, and what would be right."""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from models.errors import DoubleflowError

KINDS = {
    "path_type": "it should be a path",
    "tuple_type": "it should be a list, as in [a, b]",
    "list_type": "it should be a list, as in [a, b]",
    "dict_type": "it should be a mapping, as in {a: b}",
}
"""Pydantic's name of an error -> what would be right, in the words of YAML."""
LONGEST_VALUE = 60
MOST_PROBLEMS = 5
NO_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""What PyYAML raises for text that it cannot read: beside its own errors those of Python for a 13th month, digits
without end, a tag that does not suit its value or thousands of brackets."""


class ConfigError(DoubleflowError, ValueError):
    """A run cannot start as configured."""


class RecipeError(ConfigError):
    """A recipe, or what the command line says of it, cannot be used."""


def described(error: ValidationError, root: type[BaseModel]) -> str:
    """All that pydantic found wrong with a `root`, each problem once: the field's path, its value, what would be right.

    A name that is no field comes with the nearest that is one, or with all that there are.
    """
    found: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        path, holder = _place(root, problem["loc"])
        found.setdefault(path, []).append(_sentence(problem, path, root, holder))
    sentences = [" or ".join(dict.fromkeys(texts)) for texts in found.values()]
    left = len(sentences) - MOST_PROBLEMS
    return "; ".join([*sentences[:MOST_PROBLEMS], *([f"and {left} more"] if left > 0 else [])])


def near(name: str, known: Iterable[str], most: int = 2) -> str:
    """ "; did you mean x?", of the nearest at most so many, or nothing where nothing is near."""
    found = difflib.get_close_matches(name, list(known), n=most)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _sentence(problem: ErrorDetails, path: str, root: type, holder: type | None) -> str:
    kind, value = problem["type"], problem["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _no_field(path, root, holder, problem["loc"][-1])
    if kind in ("missing", "missing_argument"):
        return f"{path or 'the whole'} is missing"
    if kind == "value_error":
        text = str(problem["ctx"]["error"])
        return text if not path or path.rpartition(".")[2] in text else f"{path}: {text}"
    section = section_of(_annotation(root, path))
    if kind in ("model_type", "model_attributes_type", "dataclass_type") and section is not None:
        return f"{path or 'the whole'}{_is(value)}; it is a section with the fields {', '.join(_fields(section))}"
    said = KINDS.get(kind) or problem["msg"].replace("Input should", "it should", 1)
    return f"{path or 'the whole'}{_is(value)}; {said[0].lower()}{said[1:]}"


def _is(value: Any) -> str:
    """ " is 3"; a large value, or one with parts, is not repeated."""
    scalar = isinstance(value, str | int | float | bool | NoneType)
    return f" is {value!r}" if scalar and len(repr(value)) <= LONGEST_VALUE else " is of another kind"


def _no_field(path: str, root: type, holder: type | None, last: int | str) -> str:
    if isinstance(last, str) and "." in last and ":" not in last and holder is not None:
        outer, *inner = last.split(".")
        return f"{last!r} is one name with dots: write sections within one another, as in {outer}: {{{inner[0]}: ...}}"
    where, _, name = path.rpartition(".")
    text = f"{where} has no field {name!r}" if where else f"there is no field {name!r}"
    known = list(_fields(holder)) if holder else []
    nearest = near(name, known)
    if nearest:
        return text + nearest
    elsewhere = [found for found in field_paths(root) if found.rpartition(".")[2] == name]
    if elsewhere:
        return f"{text}; did you mean {' or '.join(elsewhere[:3])}?"
    return f"{text}; known: {', '.join(known)}" if known else text


def _place(root: type, location: tuple[int | str, ...]) -> tuple[str, type | None]:
    """The dotted path of pydantic's location, and the section that its last part should be a field of.

    Pydantic also names the members of a union that it tried; they are no part of a path.
    """
    path: list[str] = []
    holder: type | None = None
    here: Any = root
    for part in location:
        if part == "[key]":  # the name of the entry before it is wrong, which the mapping is told
            path.pop()
            continue
        section, entries = section_of(here), _entries(here, type(part))
        if section is not None:
            holder, here = section, _fields(section).get(str(part))
        elif entries is not None:
            holder, here = None, entries
        else:
            continue
        path.append(_shown(part))
    return ".".join(path), holder


def _shown(part: int | str) -> str:
    """A part of a path, also where somebody's own name is long or cannot be shown."""
    text = str(part)
    return text if text.isprintable() and len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]!r}"


def _annotation(root: type, path: str) -> Any:
    here: Any = root
    for part in filter(None, path.split(".")):
        here = type_below(here, part, int if part.isdigit() else str)
    return here


def type_below(annotation: Any, name: str, key: type = str) -> Any:
    """The type of what has this name in a section, or in a mapping, of this type; None where nothing has."""
    section = section_of(annotation)
    return _fields(section).get(name) if section else _entries(annotation, key)


def section_of(annotation: Any) -> type | None:
    """The section, a pydantic model or dataclass, that a field of this type holds."""
    found = (one for one in _members(annotation) if isinstance(one, type))
    return next((one for one in found if issubclass(one, BaseModel) or is_dataclass(one)), None)


def _fields(section: type) -> dict[str, Any]:
    """Name -> type of a section's fields."""
    if issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    return get_type_hints(section)


def _entries(annotation: Any, key: type) -> Any:
    """The type of the entries that such a key names: those of a mapping, or by number those of a list or tuple."""
    kinds = (dict,) if key is str else (dict, list, tuple)
    for one in _members(annotation):
        if get_origin(one) in kinds:
            return get_args(one)[-1 if get_origin(one) is dict else 0]
    return None


def _members(annotation: Any) -> Iterator[Any]:
    """The type itself, or those of a union, without annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def field_paths(section: type, path: str = "") -> Iterator[str]:
    """Every field's dotted path."""
    for name, annotation in _fields(section).items():
        yield path + name
        below = section_of(annotation)
        if below is not None:
            yield from field_paths(below, f"{path}{name}.")


def why_no_yaml(error: Exception) -> str:
    """What is wrong with a text that PyYAML cannot read, by one of the errors of `NO_YAML`, and where."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())[:200] if isinstance(error, ValueError) else "a tag does not suit its value"
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or 'not text'}{where}"
