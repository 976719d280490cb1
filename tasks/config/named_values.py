# SPDX-License-Identifier: Apache-2.0
"""Values that a command takes by name, `--option name=value`, before it knows what they are for."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from models.registry import SHORT_NUMBER
from tasks.config.errors import NO_YAML, ConfigError, why_no_yaml


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number. PyYAML takes it for text, by YAML 1.1: a field of numbers makes one of that,
    but an option, whose kind nobody may know, would stay text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{SHORT_NUMBER.pattern})$"), [*"-+.0123456789"])


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
