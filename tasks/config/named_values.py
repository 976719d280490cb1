# SPDX-License-Identifier: Apache-2.0
"""Values that a command takes by name, `--option name=value`, before it knows what they are for."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from models.registry import SHORT_NUMBER
from tasks.config.errors import NO_YAML, ConfigError, why_no_yaml
from tasks.system.distinct_names import DistinctLoader

FLOAT, INT = (f"tag:yaml.org,2002:{kind}" for kind in ("float", "int"))


class _Loader(DistinctLoader):
    """YAML in which 1e-3 is a number. PyYAML takes it for text, by YAML 1.1: a field of numbers makes one of that, but
    an option, whose kind nobody may know, would stay text. 1_2 and 1:30 are text, as in YAML 1.2; so is 010, which is 8
    to one reader and 10 to another."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (FLOAT, INT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _tag, _pattern in (
    (FLOAT, SHORT_NUMBER.pattern),
    (FLOAT, r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
    (INT, r"[-+]?(?:0|[1-9][0-9]*|0x[0-9a-fA-F]+)"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), [*"-+.0123456789"])


def typed_value(text: str) -> Any:
    """What a value that was typed on the command line is: YAML, and 1e-3 a number. Raises one of `NO_YAML`."""
    return yaml.load(text, _Loader)


def named_values(settings: Sequence[str]) -> dict[str, Any]:
    """`["a=1"]` as {"a": 1}; values are YAML. Raises ConfigError for a setting without a name or that is no YAML."""
    pairs = [setting.partition("=") for setting in settings]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{name!r} must have the form name=value")
    return {name: _value(name, text) for name, _, text in pairs}


def _value(name: str, text: str) -> Any:
    try:
        return typed_value(text)
    except NO_YAML as error:
        raise ConfigError(f"{name}: the value {text!r:.100} is not YAML: {why_no_yaml(error)}") from error
