# SPDX-License-Identifier: Apache-2.0
"""Values that a command takes by name, `--option name=value`, before it knows what they are for."""

from collections.abc import Sequence
from typing import Any

import yaml

from tasks.config.errors import NO_YAML, ConfigError, why_no_yaml


def named_values(settings: Sequence[str]) -> dict[str, Any]:
    """`["a=1"]` as {"a": 1}; values are YAML. Raises ConfigError for a setting without a name or that is no YAML."""
    pairs = [setting.partition("=") for setting in settings]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{name!r} must have the form name=value")
    return {name: _value(name, text) for name, _, text in pairs}


def _value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except NO_YAML as error:
        raise ConfigError(f"{name}: the value {text!r:.100} is not YAML: {why_no_yaml(error)}") from error
