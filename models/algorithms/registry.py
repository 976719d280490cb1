"""Names to functions, for advantages and losses.

A name may also be an import path, `package.module:object`, so that a user's own file needs no edit in here.
"""

import importlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NameRegistry(Generic[T]):
    """A table of named objects with errors that list what is known."""

    def __init__(self, what: str, field: str):
        self.what, self.field = what, field
        self.entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
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
            return self._imported(name)
        known = ", ".join(sorted(self.entries))
        raise ValueError(f"{self.field} is {name!r}; known: {known}; or give package.module:object")

    def _imported(self, path: str) -> T:
        module_name, _, attribute = path.partition(":")
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self.field} is {path!r}, which cannot be imported: {error}") from error


def _path(entry: Any) -> str:
    return f"{entry.__module__}.{entry.__qualname__}"
