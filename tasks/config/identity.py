# SPDX-License-Identifier: Apache-2.0
"""Which settings a run's name stands for, by the marks `NotShaping` and `Later` (models.config) on the fields."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from models.config.actor import OptimConfig
from models.config.section import Mark


def shaping(section: BaseModel) -> dict[str, Any]:
    """A section's fields that shape the weights, as JSON has them; a marked section is left out whole."""
    return _counted(section, section.model_dump(mode="json"))


def paced_by_length(sde_window_mode: str, optim: OptimConfig) -> str | None:
    """The setting by which a longer run is not the same at its beginning, if there is one."""
    if sde_window_mode == "decay":
        return "sde_window_mode decay"
    return f"lr_scheduler_type {optim.lr_scheduler_type}" if optim.spans_the_run else None


def _counted(value: Any, dumped: Any) -> Any:
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {
            name: _counted(getattr(value, name), dumped[name])
            for name, field in fields.items()
            if _counts(field, getattr(value, name))
        }
    if isinstance(value, Mapping) and all(isinstance(entry, BaseModel) for entry in value.values()):
        return {name: _counted(entry, dumped[name]) for name, entry in value.items()}
    return dumped


def _counts(field: FieldInfo, value: Any) -> bool:
    if Mark.NOT_SHAPING in field.metadata:
        return False
    if Mark.LATER not in field.metadata:
        return True
    default = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) and default is not None:
        return shaping(value) != shaping(default)  # only what shapes the weights can make the difference
    return value != default
