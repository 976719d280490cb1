# SPDX-License-Identifier: Apache-2.0
"""What a setting may be at most, and which text and options one may hold.

The limits are no advice: they refuse what can only be a slip of the keyboard, or what would fail later and less
clearly, and each says what it comes from. A field whose own meaning gives a limit has that one instead.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, Field

MOST_SEED = 2**63 - 1
"""Seeds are kept as signed 64-bit whole numbers by torch, SQL and Parquet."""
MOST_NUMPY_SEED = 2**32 - 1
"""The samplers of a sweep are NumPy's."""
MOST_ITERATIONS = 999_999
"""Folders and files of an iteration have six digits, by which they are sorted."""
MOST_STEPS = 1_000_000_000
"""Optimiser steps: a thousand of each iteration."""
MOST_PROCESSES = 4096
"""Workers, ranks or machines of one run: each is a process that a single driver starts and talks to."""
MOST_THREADS = 4096
"""CPUs, or threads, of one machine."""
MOST_GPUS = 64
"""GPUs of one process, all on one machine."""
LEAST_SHARE = 1e-4
"""Of a GPU, that Ray counts."""
MOST_BATCH = 1_000_000
"""Prompts or samples that are in memory together."""
MOST_FRAMES = 10_000
"""Of one video."""
MOST_COUNT = 1_000_000_000
"""Rows of a table."""
MOST_MEGABYTES = 1_048_576
"""A TiB, in MiB."""
MOST_RETRIES = 1000
"""Attempts at what fails each time."""
MOST_NOISE_LEVELS = 1000
"""Flow-matching models are trained on a thousand noise levels."""
MOST_PIXELS = 16_384
"""Of one side of a picture, in pixels."""
MOST_TOKENS = 131_072
"""Of a prompt, and of its longest text encoder."""
MOST_GUIDANCE = 100.0
"""Published scales end near 20; at 100 nothing but the difference of the two halves is left."""
MOST_COEFFICIENT = 1e6
"""Weights of rewards and of a loss's terms: products of a few still fit fp32."""
MOST_RATIO = 1e30
"""A ratio is at most exp(20) = 4.9e8, its logarithm being clamped: a threshold above keeps all, and fp32 holds this."""
MOST_REAL = 1e300
"""Of a sweep's range, whose field has bounds of its own."""
LONGEST_WAIT_S = 7 * 24 * 3600.0
"""A week, in seconds."""

LONGEST_TEXT = 4096
"""Characters: the longest path that Linux takes."""
LONGEST_REWARD_NAME = 100
LONGEST_SET_NAME = 50
"""Both are in one metric's name, of which MLflow takes 250 characters."""
LONGEST_NAME = 200
"""MLflow's metrics and Prefect's limits take 250 and more, its experiments 256."""
DEEPEST_OPTIONS = 20
"""Mappings and lists inside one another."""


def check_given(value: Any, annotation: Any) -> Any:
    """The value as it is, unless pydantic would take it for another: a bool for 1 or 0, a blank path for ".".

    Args:
        annotation: the field's type.

    Raises:
        ValueError: it is a bool for a field of numbers, or text for a path that `check_text` refuses, or a list of such
            values is for a list.
    """
    kinds = {*_kinds(annotation)}
    given = value if isinstance(value, list | tuple) else (value,)
    if kinds & {int, float} and bool not in kinds and any(isinstance(one, bool) for one in given):
        raise ValueError(f"it is {str(value).lower()}, which is no number: give a number")
    if Path in kinds:
        for text in given:
            if isinstance(text, str):
                check_text(text)
    return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that a type is made of, itself where it has no parts."""
    parts = get_args(annotation)
    if not parts:
        yield annotation
    for part in parts:
        yield from _kinds(part)


def check_text(text: str, may_break_lines: bool = False) -> str:
    """The text as it is, if a path, a database and a terminal can hold it.

    Raises:
        ValueError: it is blank or longer than a path may be, or has a control character or half of a surrogate pair.
    """
    allowed = "\n\t" if may_break_lines else ""
    odd = next((c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c not in allowed), None)
    if odd is not None:
        raise ValueError(f"the text has the character U+{ord(odd):04X} in it, which cannot be shown: take it out")
    if may_break_lines:
        return text
    if not text.strip():
        raise ValueError("the text is blank: give a value, or leave this out")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the text has {len(text)} characters: at most {LONGEST_TEXT} are allowed")
    return text


def check_texts(value: Any) -> Any:
    """A field's value as it is: `check_text` of the text, the path, and those in a list or naming its entries."""
    if isinstance(value, str | PurePath):
        check_text(str(value))
    elif isinstance(value, list | tuple | Mapping):
        for entry in value:
            check_texts(entry)
    return value


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options as they are, if JSON gives them back: a run records them, and its child processes read them there."""
    for name, value in options.items():
        check_text(name)
        _check_option(name, value, DEEPEST_OPTIONS)
    return options


def _check_option(path: str, value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"option {path[:80]} is nested more than {DEEPEST_OPTIONS} levels deep: give it flatter")
    if isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise ValueError(f"option {path} has the key {key!r}: keys are text, so put it in quotes")
            _check_option(f"{path}.{key}", entry, depth - 1)
    elif isinstance(value, str):
        try:
            check_text(value, may_break_lines=True)
        except ValueError as error:
            raise ValueError(f"option {path}: {error}") from error
    elif isinstance(value, int | float):
        if not math.isfinite(value) or abs(value) > (MOST_SEED if isinstance(value, int) else math.inf):
            raise ValueError(f"option {path} is {_short(value)}: numbers are finite, and whole ones have 64 bits")
    elif value is not None:
        raise ValueError(
            f"option {path} is a {type(value).__name__}: give text (a date too, in quotes), a number, true, false, "
            "null, a list or a mapping"
        )


def _short(value: float) -> str:
    return f"a whole number of {value.bit_length()} bits" if isinstance(value, int) else repr(value)


def _check_name(characters: str, most: int, rule: str) -> Callable[[str], str]:
    """A validator of names: of these characters, at most so many, with a rule that says so."""

    def check(name: str) -> str:
        if len(name) > most or not re.fullmatch(characters, name):
            given = repr(name) if len(name) <= LONGEST_NAME else f"text of {len(name)} characters"
            raise ValueError(f"{given} is no name: give {rule}, at most {most} characters")
        return name

    return check


RewardName = Annotated[
    str,
    AfterValidator(
        _check_name(
            r"\w([\w. :-]*[\w.:-])?",
            LONGEST_REWARD_NAME,
            "letters, digits and _ . - : with blanks between, a letter, digit or _ first",
        )
    ),
]
"""Of a reward: part of MLflow's metrics and parameters and of tables' columns, and it may be an import path."""
SetName = Annotated[
    str,
    AfterValidator(
        _check_name(
            r"[A-Za-z0-9_]([A-Za-z0-9_. -]*[A-Za-z0-9_.-])?",
            LONGEST_SET_NAME,
            "ASCII letters, digits and _ . - with blanks between, a letter, digit or _ first",
        )
    ),
]
"""Of a measurement's prompts: MLflow's picture keys, which are part of file names, take ASCII and no colon."""
ExperimentName = Annotated[
    str,
    AfterValidator(
        _check_name(
            r"[\w/@]([\w. /:@()+-]*[\w.:@()+-])?",
            LONGEST_NAME,
            "letters, digits and _ . - / : @ ( ) + with blanks between, a letter, digit or _ / @ first",
        )
    ),
]
"""Of an MLflow experiment, which may be a folder's path in a hosted MLflow."""
MetricName = Annotated[
    str,
    AfterValidator(
        _check_name(
            r"\w([\w. /:-]*[\w.:-])?",
            LONGEST_NAME,
            "letters, digits and _ . - / : with blanks between, a letter, digit or _ first",
        )
    ),
]
"""Of an MLflow metric."""
PoolName = Annotated[
    str, AfterValidator(_check_name(r"[^/%&<>]+", LONGEST_NAME, "text without / % & < > (Prefect takes none of them)"))
]
"""Of a concurrency limit of Prefect."""
Options = Annotated[dict[str, Any], AfterValidator(_check_options)]
"""Keyword arguments of something named in the config; finite numbers and text, nested, as JSON has them."""
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
WholeNumber = Annotated[int, Field(ge=-MOST_SEED, le=MOST_SEED)]
RealNumber = Annotated[float, Field(ge=-MOST_REAL, le=MOST_REAL)]
PositiveWholeNumber = Annotated[int, Field(gt=0, le=MOST_SEED)]
PositiveRealNumber = Annotated[float, Field(gt=0, le=MOST_REAL)]
"""Of a field that is not known yet: its own bounds count as well."""


def _check_gpus(number: float) -> float:
    """A share of one GPU or whole ones, as Ray gives them."""
    if (number > 1 and not number.is_integer()) or 0 < number < LEAST_SHARE:
        raise ValueError(
            f"{number:g} GPUs cannot be given: take a share of one GPU, from {LEAST_SHARE} on, or whole ones"
        )
    return number


Gpus = Annotated[float, Field(ge=0, le=MOST_GPUS), AfterValidator(_check_gpus)]
"""GPUs of a process: a share of one, or a whole number."""
