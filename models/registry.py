"""Classes by architecture and algorithm."""

from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)


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
