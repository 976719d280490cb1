# SPDX-License-Identifier: Apache-2.0
"""What every section of the configuration is: closed, frozen, and marked where a field does not shape a run."""

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from models.config.bounds import (
    MOST_BATCH,
    MOST_NOISE_LEVELS,
    MOST_RATIO,
    check_given,
    check_texts,
)

AUTO: Literal["auto"] = "auto"
"""In place of a number or a truth: the run finds it out before anything is loaded (`tasks.run.sizes`)."""
Samples = Annotated[int, Field(ge=1, le=MOST_BATCH)] | Literal["auto"]
"""How many are computed together."""

NoiseLevel = Annotated[int, Field(ge=0, le=MOST_NOISE_LEVELS)]


T = TypeVar("T")


class Mark(Enum):
    """What a field's annotation says of the run's name (`tasks.config.identity`); it is in no schema."""

    NOT_SHAPING = "not shaping"
    LATER = "later"


NotShaping = Annotated[T, Mark.NOT_SHAPING]
"""A setting that leaves the trained weights as they are, up to rounding: a run may go on with another value."""
Later = Annotated[T, Mark.LATER]
"""A setting that shapes the weights and is younger than runs that are to be continued. It counts only where it differs
from its default, which must be what the code did before the field was there."""


def known(value: T | Literal["auto"], field: str) -> T:
    """A setting that is no longer auto. Raises ValueError where it is: nobody has found out what it stands for."""
    if value == AUTO:
        raise ValueError(f"{field} is auto, which stands for no value yet: give one here")
    return cast(T, value)


class Section(BaseModel):
    """A part of the tree: immutable, and a misspelt field is an error rather than a silent default.

    No number is NaN, infinite or a bool, and text can be written into paths, databases and a terminal. pydantic's own
    errors repeat no input, which may be a secret in a wrong place.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_was_given(cls, value: Any, info: ValidationInfo) -> Any:
        return check_given(value, cls.model_fields[str(info.field_name)].annotation)

    @field_validator("*")
    @classmethod
    def _texts_can_be_written(cls, value: Any) -> Any:
        return check_texts(value)


def choices(*names: str, own: str | None = None) -> Callable[[dict[str, Any]], None]:
    """What a text field's form offers, for `json_schema_extra`; the field itself still checks its values.

    Args:
        names: those of the project.
        own: pattern of names of one's own; None where there are none.
    """

    def offer(schema: dict[str, Any]) -> None:
        if own is None:
            schema["enum"] = list(names)
            return
        kind = schema.pop("type")
        ours = {"title": "of the project", "type": kind, "enum": list(names)}
        schema["anyOf"] = [ours, {"title": "of your own", "type": kind, "pattern": own}]

    return offer


IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""package.module:object."""
ANY_NAME = r"^[A-Za-z_][\w.:]*$"
"""An import path, or a name that a module of one's own registers."""

Ratio = Annotated[float, Field(ge=0, le=MOST_RATIO)]
