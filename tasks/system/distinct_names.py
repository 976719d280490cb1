# SPDX-License-Identifier: Apache-2.0
"""JSON and YAML in which no name stands twice: of two the later one would count, without a word."""

import json
from collections.abc import Sequence
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"


class DistinctLoader(yaml.SafeLoader):
    """Of YAML."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self._checked = set[yaml.MappingNode]()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Raises yaml.constructor.ConstructorError. What is merged by << may stand there once more: PyYAML puts it
        among the mapping's own names here, so only what it was before counts."""
        if node not in self._checked:
            self._checked.add(node)
            _refuse_twice([key for key, _ in node.value if key.tag != MERGE and isinstance(key, yaml.ScalarNode)])
        super().flatten_mapping(node)


def _refuse_twice(keys: Sequence[yaml.ScalarNode]) -> None:
    seen = set[tuple[str, str]]()
    for key in keys:
        if (key.tag, key.value) in seen:
            raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands there twice", key.start_mark)
        seen.add((key.tag, key.value))


def plain_yaml(text: str) -> Any:
    """What YAML says, as other programs read it. Raises what PyYAML does."""
    return yaml.load(text, DistinctLoader)


def plain_json(text: str) -> Any:
    """What JSON says. Raises ValueError where it is none, or RecursionError."""
    return json.loads(text, object_pairs_hook=_distinct)


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. JSON leaves open which of two equal keys counts, so it is neither."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found
