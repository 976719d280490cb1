# SPDX-License-Identifier: Apache-2.0
"""What a config names: classes by architecture and algorithm, and anything by its name or import path."""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from models.errors import DoubleflowError
from models.import_paths import check_allowed

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SHORT_NUMBER = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))[eE]([-+]?[0-9]{1,3})")
"""Digits and exponent of a number that YAML 1.1 takes for text where it has no point, or its exponent no sign."""

C = TypeVar("C", bound=type)
T = TypeVar("T")


class WrongAnswer(DoubleflowError, ValueError):
    """What a config names gave back something else than is agreed."""


class Registry:
    """Classes under (architecture, algorithm), or under an architecture alone (algorithm None)."""

    def __init__(self, what: str):
        self.what = what
        self.entries: dict[tuple[str, str | None], type] = {}

    def register(self, architecture: str, algorithm: str | None) -> Callable[[C], C]:
        """Class decorator.

        Raises:
            ValueError: another class has that place.
        """

        def decorate(cls: C) -> C:
            key = (architecture, algorithm)
            known = self.entries.get(key)
            if known is not None and (known.__module__, known.__qualname__) != (
                cls.__module__,
                cls.__qualname__,
            ):
                raise ValueError(
                    f"{self.what} for {key} is already registered: {known.__module__}.{known.__qualname__}"
                )
            self.entries[key] = cls
            return cls

        return decorate

    def find(self, architecture: str, algorithm: str | None) -> type | None:
        """The exact pair first, then the architecture's own."""
        return self.entries.get((architecture, algorithm)) or self.entries.get((architecture, None))


class NameRegistry(Generic[T]):
    """A table of named objects with errors that list what is known.

    A name may also be an import path, `package.module:object`, so that a user's own file needs no edit in here.
    """

    def __init__(self, what: str, field: str):
        self.what, self.field = what, field
        self.entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters an object.

        Raises:
            ValueError: another one has that name.
        """

        def decorate(entry: T) -> T:
            known = self.entries.get(name)
            if known is not None and _path(known) != _path(entry):
                raise ValueError(f"{self.what} {name!r} is already registered as {_path(known)}")
            self.entries[name] = entry
            return entry

        return decorate

    def get(self, name: str) -> T:
        """The entry called `name`, or the object at the import path `module:object`.

        Raises:
            ValueError: neither; the message names the config field and lists the known names.
        """
        if name in self.entries:
            return self.entries[name]
        if ":" in name:
            return import_object(name, f"{self.field} is {name!r}, which")
        known = ", ".join(sorted(self.entries))
        raise ValueError(f"{self.field} is {name!r}; known: {known}; or give package.module:object")


def import_object(path: str, what: str) -> Any:
    """The object at the import path "package.module:object".

    Args:
        path: the import path.
        what: begins the error's sentence: what names the path.

    Raises:
        ModuleNotAllowed: this machine's setting does not allow the module.
        ValueError: there is no such module or object, or the module cannot be imported.
    """
    module, _, attribute = path.partition(":")
    check_allowed(path)
    try:
        return getattr(importlib.import_module(module), attribute)
    except SystemExit as error:  # a script's, which would end the command as if all were done
        raise ValueError(f"{what} cannot be imported: {module} ends the process (exit code {error.code})") from error
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        raise ValueError(f"{what} cannot be imported: {error}") from error


def _path(entry: Any) -> str:
    named = entry[0] if isinstance(entry, tuple) else entry
    return f"{named.__module__}.{named.__qualname__}"


def check_call(what: str, target: Any, positional: Collection[str], named: Collection[str] = ()) -> None:
    """Can `target` be called with these arguments, whatever options come to them?

    Args:
        what: begins the error's sentence: the field, and what it names.
        target: what the field's import path leads to.
        positional, named: the arguments that the project gives by position and by name.

    Raises:
        ValueError: it is no function or class, or takes other arguments.
    """
    if not callable(target):
        raise ValueError(f"{what} is no function but a {type(target).__name__}: name one")
    try:
        inspect.signature(target).bind_partial(*positional, **dict.fromkeys(named))
    except TypeError as error:
        given = ", ".join([*positional, *(f"{name}=..." for name in named)])
        raise ValueError(f"{what} cannot be called with ({given}): {error}") from error


def check_options(field: str, name: str, target: Callable, options: Mapping[str, Any], given: Collection[str]) -> None:
    """Are these keyword arguments ones that the config may give to `target`?

    What a parameter `**kwargs` would swallow is refused like any other misspelt setting.

    Args:
        field: where the options stand in the config.
        name: of the target in the config.
        target: a function, or a class for its `__init__`.
        options: what the config gives.
        given: parameters that the project itself fills in.

    Raises:
        ValueError: an option that is no parameter, a parameter without a default that is not among them, or a value of
            another kind than the parameter's annotation says.
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(target).parameters
    own = {p.name: p.default is p.empty for p in parameters.values() if p.kind in kinds and p.name not in given}
    unknown = sorted(options.keys() - own.keys())
    if unknown:
        known = f"takes {', '.join(sorted(own))}" if own else "takes no options"
        raise ValueError(f"{field} has {', '.join(unknown)}, but {name} {known}")
    missing = sorted(option for option, needed in own.items() if needed and option not in options)
    if missing:
        raise ValueError(f"{field} lacks {', '.join(missing)}, without which {name} cannot be used")
    for option, value in options.items():
        check_kind(f"{field}.{option}", parameters[option], value)


def check_kind(what: str, parameter: inspect.Parameter, value: Any) -> None:
    """Is a value that JSON can hold of the kind that a parameter's annotation says?

    Nothing is said of a parameter without annotation, of one whose annotation is text or no kind of JSON, and of its
    own default.

    Args:
        what: begins the error's sentence: what names the option.

    Raises:
        ValueError: it is of another kind, or out of bounds; also text where a number should be, as YAML reads 1e-3. A
            parameter without annotation, whose default is a number, should be one.
    """
    from pydantic import PydanticUserError, TypeAdapter, ValidationError  # here: models sample without it

    annotation, spelt = parameter.annotation, _spelt_out(value)
    if spelt and annotation is parameter.empty and type(parameter.default) in (int, float):
        raise ValueError(f"{what} is {value!r}, which is text to YAML: write {spelt} for the number")
    if annotation is parameter.empty or isinstance(annotation, str) or value == parameter.default:
        return
    try:
        kind = TypeAdapter(annotation)
    except PydanticUserError:  # an array, a tensor
        return
    try:
        kind.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        found = {problem["type"]: problem["msg"].replace("Input", "it", 1) for problem in error.errors()}
        wrong = (found | {"missing": "it has too few entries"} if "missing" in found else found).values()
        advice = f": write {spelt}, as YAML takes {value} for text" if spelt and _takes(kind, float(value)) else ""
        raise ValueError(f"{what} is {value!r:.100}; {' or '.join(wrong)}{advice}") from error


def _takes(kind: "TypeAdapter[Any]", number: float) -> bool:
    try:
        kind.validate_json(json.dumps(number), strict=True)
    except ValueError:
        return False
    return True


def _spelt_out(value: Any) -> str:
    """A number as YAML 1.1 reads it, of text that it would be in YAML 1.2: 1.0e-3 of 1e-3; empty of all else."""
    if not isinstance(value, str) or (found := SHORT_NUMBER.fullmatch(value)) is None:
        return ""
    digits, exponent = found.groups()
    return f"{digits if '.' in digits else f'{digits}.0'}e{int(exponent):+d}"
