# SPDX-License-Identifier: Apache-2.0
"""The overrides that a shell script gives a program: `a.b=c` words, with the script's own variables in place.

Whatever else among the program's own words is about settings comes along: `group=choice`, `~a.b`, `--config-name=x`.

The script is read, not run. Of a shell it knows assignments, `$NAME`, `${NAME:-default}` and whole-number `$((...))`.
Where a variable is set more than once, as in the branches of an `if`, the last one counts, and `+=` adds to it; what
another program says, `$(...)`, and variables that are set elsewhere stay as they are written.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import yaml

from tasks.config.errors import NO_YAML, ConfigError

OVERRIDE = re.compile(r"^\+{0,2}(?P<path>[A-Za-z_]\w*(?:\.[\w-]+)+)=(?P<value>.*)$", re.DOTALL)
OTHER = re.compile(
    r"^(?P<path>\+{0,2}[A-Za-z_][\w./@-]*)=(?P<value>.*)$|^(?P<taken_away>~[A-Za-z_][\w.]*)(?:=.*)?$", re.DOTALL
)
"""A word that is no override of one field, but says something of the settings: of a group, or that a field is gone."""
GROUP = re.compile(r"^\+{0,2}[A-Za-z_][\w.]*[/@][\w./@-]*=|^~[A-Za-z_][\w.]*(?:=|$)|^--config-(?:name|path|dir)\b")
"""Such a word as no shell variable is written."""
ARRAY = re.compile(
    r"^\s*(?:(?:declare|local|readonly)\s+(?:-\w+\s+)*)?(?P<name>[A-Za-z_]\w*)(?P<adds>\+?)=\((?P<rest>.*)$",
    re.DOTALL,
)
"""Words for a later command; it goes on until its bracket closes."""
NO_BRACKETS = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<![^\s();])\#.*""", re.DOTALL)
"""In it a bracket is only text: what is quoted, and a comment."""
FLAG = re.compile(r"^(?P<path>--?[A-Za-z][\w-]*)(?:=(?P<value>.*))?$", re.DOTALL)
THEIRS = re.compile(r"^verl(?:_omni)?\.")
ENDS_COMMAND = re.compile(r"^(?:\|\|?|&&?|;|\d*[<>].*)$")
ASSIGNMENT = re.compile(r"^(?P<name>[A-Za-z_]\w*)(?P<adds>\+?)=(?P<value>.*)$", re.DOTALL)
DECLARES = ("export", "local", "readonly", "declare")
BEGINS = ("then", "else", "do")
"""Words before a command that is one of a branch or a loop."""
UNCOMMENTED = re.compile(r"""(?:\s*+(?!\#)(?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*")++)*+""", re.DOTALL)
"""A line's words up to one that begins with #, or to a quote that nothing closes."""
ENTRY = re.compile(r"(?<=[{,])(?P<key>\s*[\w.-]+):(?=\S)")
"""Hydra's mappings need no blank behind a key, YAML's do."""
VARIABLE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::?[-=](?P<default>[^{}]*))?\}|(?P<plain>[A-Za-z_]\w*))")
ARITHMETIC = re.compile(r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)")
UNFILLED = re.compile(r"\$(?:\{[^{}]*\}?|\(|[A-Za-z_]\w*|[\d@*#?])|`")
"""What a shell or OmegaConf puts something in place of, and nothing here does."""
COMMAND = re.compile(r"\$\([^()]*(?:\([^()]*\)[^()]*)*\)")
UNKNOWN = "$SET_BY_A_COMMAND"
TWO_NUMBERS = re.compile(r"^(?=.*\.)[\d.eE+-]+_[\d.eE+-]+$")
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
        path: dotted, without Hydra's `+` or `++`; or the word as it stands, where it is no override of one field.
        value: read as YAML, which is what Hydra's values are as far as the reference's scripts go; None for a word that
            has none.
    """

    path: str
    value: Any = None

    def __str__(self) -> str:
        has_none = self.value is None and self.path.startswith(("~", "-"))
        return self.path if has_none else f"{self.path}={self.value}"


class Array(NamedTuple):
    """One assignment of an array.

    Attributes:
        line: where it begins.
        adds: to what the array held before, as `+=` does; otherwise it takes its place.
    """

    name: str
    line: int
    adds: bool


def read_overrides(text: str, source: str = "the script") -> list[Override]:
    """All overrides of a script, or of a list with one override a line, in their order; a later one replaces an earlier
    one of the same path where it stands.

    Raises:
        ConfigError: there is none, a line with one cannot be read, or they are several runs'.
    """
    found, runs = dict[str, Override](), list[list[str]]()
    for command, array in commands(text, source):
        found |= {override.path: override for override in _overrides(command, start=0 if array else None)}
        if not array and _starts_run(command) and command not in runs:
            runs.append(command)
    if len(runs) > 1:
        raise ConfigError(f"{source} starts {len(runs)} runs, whose overrides would be mixed: give one of them")
    if not found:
        raise ConfigError(
            f"{source} holds no override of the form section.field=value: give a script that starts a run"
        )
    return list(found.values())


def commands(text: str, source: str) -> Iterator[tuple[list[str], Array | None]]:
    """The words of each command of a script that does more than give variables values, and of each line of an array,
    with that array. No command is without words, and `else` is one.

    Raises:
        ConfigError: a line with an override cannot be read.
    """
    variables: dict[str, str] = {}
    for number, line, array in _without_brackets(_lines(text)):
        place = f"{source}, line {number}"
        words = _words(_filled(line, variables, place), place)
        for command in [words] if array else _commands(words):
            if array or (command and not _assigns(command, variables)):
                yield command, array


def _starts_run(words: list[str]) -> bool:
    """Does it give a module of the reference's overrides?"""
    return any(OVERRIDE.match(word) for word in words) and any(
        before == "-m" and THEIRS.match(word) for before, word in pairwise(words)
    )


def _commands(words: list[str]) -> Iterator[list[str]]:
    """Those of one line, without the words that put them into a branch or a loop."""
    command: list[str] = []
    for word in [*words, ";"]:
        if word.strip(";"):
            command.append(word)
            continue
        if command[:1] == ["else"]:
            yield command[:1]
        yield command[1:] if command and command[0] in BEGINS else command
        command = []


def _assigns(words: list[str], variables: dict[str, str]) -> bool:
    """Whether a command gives variables values, which are then noted, and does nothing else."""
    assigned = [ASSIGNMENT.match(word) for word in words if word not in DECLARES]
    if not all(assigned) or any(OVERRIDE.match(word) for word in words):
        return False
    for match in filter(None, assigned):
        before = variables.get(match["name"], "") if match["adds"] else ""
        variables[match["name"]] = before + match["value"]
    return True


def _overrides(words: list[str], start: int | None = None) -> Iterator[Override]:
    """Those of a command line: all of the form a.b=c, and, from `start` on, what else its program is given."""
    start = _own_words(words) if start is None else start
    end = next((index for index, word in enumerate(words) if index >= start and ENDS_COMMAND.match(word)), len(words))
    for index, word in enumerate(words):
        is_own, override = start <= index < end, OVERRIDE.match(word)
        if override:
            yield Override(override["path"], value_of(override["value"]))
        elif is_own and (other := OTHER.match(word)):
            yield Override(
                other["taken_away"] or other["path"], None if other["taken_away"] else value_of(other["value"])
            )
        elif is_own and (flag := FLAG.match(word)):
            follows = words[index + 1] if index + 1 < end and flag["value"] is None else ""
            told = flag["value"] if not follows or follows.startswith(("-", "$")) or "=" in follows else follows
            yield Override(flag["path"], None if told is None else value_of(told))


def _own_words(words: list[str]) -> int:
    """From where on the words are the program's own: behind its module or file, or all of a list of overrides."""
    first = next((index for index, word in enumerate(words) if OVERRIDE.match(word) or GROUP.match(word)), None)
    modules = [index for index, word in enumerate(words) if index and words[index - 1] == "-m" and THEIRS.match(word)]
    if first is None:
        return modules[-1] + 1 if modules else len(words)
    before = words[:first]
    programs = [
        index for index, word in enumerate(before) if word.endswith(".py") or before[index - 1 : index] == ["-m"]
    ]
    if programs:
        return programs[-1] + 1
    named = [index for index, word in enumerate(before) if "=" not in word]
    return named[-1] + 1 if named else 0


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


def _without_brackets(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, Array | None]]:
    """The lines, and the array that each is in, if it is in one: then without its name and brackets."""
    array: Array | None = None
    for number, line in lines:
        begins = None if array else ARRAY.match(line)
        inside = begins["rest"] if begins else line
        array = Array(begins["name"], number, bool(begins["adds"])) if begins else array
        end = _closing(inside) if array else None
        yield number, inside[:end], array
        if end is not None:
            array = None
            yield number, inside[end + 1 :], None


def _closing(line: str) -> int | None:
    """Where a bracket closes that was opened before the line; None where none does."""
    depth = 0
    for index, character in enumerate(NO_BRACKETS.sub(lambda match: " " * len(match[0]), line)):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            return index
    return None


def _words(line: str, place: str) -> list[str]:
    """As a shell takes them apart, `;` among them; # begins a comment in front of a word, and not within one."""
    words = UNCOMMENTED.match(line)
    end = words.end() if words else 0
    lexer = shlex.shlex(line[:end] if line[end:].lstrip().startswith("#") else line, posix=True, punctuation_chars=";")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
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


def value_of(text: str) -> Any:
    """As YAML, and text where that fails; numbers like 1e-5, which YAML 1.1 takes for text, are numbers.

    0.5_5 is text: verl writes two bounds so, which YAML 1.1 and Python read as 0.55.
    """
    if TWO_NUMBERS.match(text):
        return text
    try:
        value = yaml.safe_load(ENTRY.sub(r"\g<key>: ", text) if text.startswith("{") else text)
    except NO_YAML:
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
