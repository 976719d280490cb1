# SPDX-License-Identifier: Apache-2.0
"""The overrides that a shell script gives a program: `a.b=c` words, with the script's own variables in place.

The script is read, not run. Of a shell it knows assignments, `$NAME`, `${NAME:-default}` and whole-number `$((...))`.
Where a variable is set more than once, as in the branches of an `if`, the last one counts; what another program says,
`$(...)`, and variables that are set elsewhere stay as they are written.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tasks.config.errors import NO_YAML, ConfigError

OVERRIDE = re.compile(r"^(?:\+{0,2}|~)(?P<path>[A-Za-z_]\w*(?:\.[\w-]+)+)=(?P<value>.*)$", re.DOTALL)
ASSIGNMENT = re.compile(r"^(?P<name>[A-Za-z_]\w*)=(?P<value>.*)$", re.DOTALL)
DECLARES = ("export", "local", "readonly", "declare")
VARIABLE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::?[-=](?P<default>[^{}]*))?\}|(?P<plain>[A-Za-z_]\w*))")
ARITHMETIC = re.compile(r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)")
COMMAND = re.compile(r"\$\([^()]*(?:\([^()]*\)[^()]*)*\)")
UNKNOWN = "$SET_BY_A_COMMAND"
LONGEST_LINE = 100_000
"""Characters: a variable may hold another twice, which holds one twice, and so on."""
OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Override:
    """One override as it was given.

    Attributes:
        path: dotted, without Hydra's `+`, `++` or `~`.
        value: read as YAML, which is what Hydra's values are as far as the reference's scripts go.
    """

    path: str
    value: Any


def read_overrides(text: str, source: str = "the script") -> list[Override]:
    """All overrides of a script, or of a list with one override a line, in their order; a later one replaces an earlier
    one of the same path where it stands.

    Raises:
        ConfigError: there is none, or a line with one cannot be read.
    """
    found: dict[str, Override] = {}
    variables: dict[str, str] = {}
    for number, line in _lines(text):
        place = f"{source}, line {number}"
        words = _words(_filled(line, variables, place), place)
        assigned = [ASSIGNMENT.match(word) for word in words if word not in DECLARES]
        if all(assigned) and not any(OVERRIDE.match(word) for word in words):
            variables |= {match["name"]: match["value"] for match in assigned if match}
            continue
        for override in filter(None, map(OVERRIDE.match, words)):
            found[override["path"]] = Override(override["path"], _value(override["value"]))
    if not found:
        raise ConfigError(
            f"{source} holds no override of the form section.field=value: give a script that starts a run"
        )
    return list(found.values())


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each command line, those that a backslash continues as one; comments are left out."""
    whole, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not whole:
            start = number
        if line.lstrip().startswith("#"):
            continue
        if line.rstrip().endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        yield start, whole + line
        whole = ""
    if whole:
        yield start, whole


def _words(line: str, place: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        if any(OVERRIDE.match(word) for word in line.split()):
            raise ConfigError(f"{place} cannot be read as a shell would ({error}): mend its quotes") from error
        return []


def _filled(text: str, variables: dict[str, str], source: str) -> str:
    """The text with its variables and sums in place; an unknown variable stays as it is written."""

    def variable(match: re.Match[str]) -> str:
        default = match["default"]
        known = variables.get(match["braced"] or match["plain"])
        return known if known is not None else match[0] if default is None else default

    for _ in range(len(variables) + 2):  # a default may name a variable, whose value may name another
        filled = VARIABLE.sub(variable, text)
        if len(filled) > LONGEST_LINE:
            raise ConfigError(
                f"{source}: a line of more than {LONGEST_LINE} characters, with its variables in place: mend it"
            )
        if filled == text:
            break
        text = filled
    return COMMAND.sub(UNKNOWN, ARITHMETIC.sub(lambda match: _sum(match["sum"], variables), text))


def _sum(text: str, variables: dict[str, str]) -> str:
    """What `$((text))` is, or that nobody knows."""
    try:
        return str(_number(ast.parse(text.replace("$", "").strip(), mode="eval").body, variables))
    except (SyntaxError, KeyError, TypeError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return UNKNOWN


def _number(node: ast.expr, variables: dict[str, str]) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]  # TypeError and ValueError are the caller's
    if isinstance(node, ast.Name):
        return int(variables[node.id])
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](_number(node.left, variables), _number(node.right, variables))
    raise TypeError(node)


def _value(text: str) -> Any:
    """As YAML, and text where that fails; numbers like 1e-5, which YAML 1.1 takes for text, are numbers."""
    try:
        value = yaml.safe_load(text)
    except NO_YAML:
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
