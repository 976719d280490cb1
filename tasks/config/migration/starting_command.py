# SPDX-License-Identifier: Apache-2.0
"""The command of a shell script that starts a run from a Python configuration, and what it says itself.

`torchrun train.py --config config/grpo.py:general_ocr_sd3 --config.train.beta=0.1`: the words may stand in an array, or
in a text that a shell runs.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from tasks.config.errors import ConfigError
from tasks.config.migration.script import Array, commands, value_of

ARRAY_WORDS = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)\[[@*]\](?:[^{}]|\$\{[^{}]*\})*\}")
"""What stands for an array's words, as `${X[@]}` and `${X[@]+"${X[@]}"}` do."""
SHELL_TEXT = re.compile(r"^-[a-z]*c$")
"""Goes before a text that a shell runs."""
CONFIG_FILE = re.compile(r"^(?P<file>\S+\.py)(?::(?P<function>\w+))?$")
SETTING = "config."
"""Begins an option of a command line that gives one setting another value, once the function has made all."""
PROCESSES, PER_NODE, NODES = ("num_processes",), ("nproc_per_node", "nproc-per-node"), ("nnodes",)
"""Options of accelerate's launcher, and of torchrun's two."""


@dataclass(frozen=True)
class Start:
    """A command that starts a run: its configuration file, the function in it, and what the command says itself.

    Attributes:
        gpus: its number of processes; text where the script does not say it.
        settings: path -> value, of the words `--config.path=value`.
    """

    file: str
    function: str | None = None
    gpus: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def named_by(script: str, source: str = "the script") -> Start | None:
    """The command of a shell script that names a configuration, if there is one; or else the array that does.

    Raises:
        ConfigError: there are several, of different runs.
    """
    shell = _Shell()
    for array, lines in groupby(commands(script, source), key=itemgetter(1)):
        if array:
            shell.assign(array, [word for words, _ in lines for word in words])
        else:
            for words, _ in lines:
                shell.command(words)
    starts = shell.starts or shell.of_arrays()
    starts += [start for start in shell.replaced if not _is_named(start, starts)]
    if len(starts) > 1:
        named = ", ".join(f"{start.file}:{start.function}" for start in starts)
        raise ConfigError(f"{source} starts {len(starts)} runs ({named}): give one of them")
    return starts[0] if starts else None


@dataclass
class _Shell:
    """What a script's commands and arrays name.

    Attributes:
        starts: of its commands.
        arrays: name -> words, with those of other arrays in place.
        inner: names of the arrays whose words are in another one.
        replaced: by arrays that an `else` gave other words.
        in_else: is that where the script is?
    """

    starts: list[Start] = field(default_factory=list)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    replaced: list[Start] = field(default_factory=list)
    in_else: bool = False

    def assign(self, array: Array, words: list[str]) -> None:
        """The last assignment of an array counts; in the branches of an `if` nobody knows which one that is."""
        before = self.arrays.get(array.name, [])
        made = [*(before if array.adds else []), *self._in_place(words)]
        self.inner |= {name for word in words for name in ARRAY_WORDS.findall(word)} - {array.name}
        self.arrays[array.name] = made
        was, now = _start(before), _start(made)
        if self.in_else and was and now and not _is_named(was, [now]):
            self.replaced.append(was)

    def command(self, words: list[str]) -> None:
        if words[0] in ("else", "elif", "fi"):
            self.in_else = words[0] != "fi"
        start = None if words[0] in ("echo", "printf") else _start(self._in_place(_of_text(words)))
        if start and start not in self.starts:
            self.starts.append(start)

    def of_arrays(self) -> list[Start]:
        """For a script whose commands use its arrays in a way that is not read."""
        found = [_start(words) for name, words in self.arrays.items() if name not in self.inner]
        return [start for index, start in enumerate(found) if start and start not in found[:index]]

    def _in_place(self, words: list[str]) -> list[str]:
        """The words, with those of an array where one stands for them."""
        names = [ARRAY_WORDS.fullmatch(word) for word in words]
        return [
            one
            for word, name in zip(words, names, strict=True)
            for one in (self.arrays.get(name["name"], []) if name else [word])
        ]


def _start(words: list[str]) -> Start | None:
    given = _options(words)
    found = CONFIG_FILE.match(given.get("config", ""))
    return Start(found["file"], found["function"], _gpus(given), _settings(given)) if found else None


def _is_named(start: Start, others: Sequence[Start]) -> bool:
    """Do others name the same configuration, whatever else they say?"""
    return (start.file, start.function) in [(other.file, other.function) for other in others]


def _of_text(words: list[str]) -> list[str]:
    """The words of a command, with those of a text that a shell runs in place of it: `eval "..."`, `bash -c "..."`."""
    given = ["", *words]
    runs = [words[0] == "eval" or SHELL_TEXT.match(before) is not None for before in given[:-1]]
    return [one for word, is_text in zip(words, runs, strict=True) for one in (_split(word) if is_text else [word])]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that nothing closes
        return text.split()


def _options(words: list[str]) -> dict[str, str]:
    """Name -> value of `--name=value` and `--name value`; `true` where it has none."""
    found: dict[str, str] = {}
    for word, follows in pairwise([*words, "--"]):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            found[name] = value if has_value else "true" if follows.startswith("--") else follows
    return found


def _gpus(given: Mapping[str, str]) -> Any:
    total, each, nodes = (
        next((value_of(given[name]) for name in names if name in given), None) for names in (PROCESSES, PER_NODE, NODES)
    )
    if total is not None or each is None:
        return total
    counted = isinstance(each, int) and isinstance(nodes or 1, int)
    return each * (nodes or 1) if counted else f"{nodes or 1} x {each}"


def _settings(given: Mapping[str, str]) -> dict[str, Any]:
    return {name.removeprefix(SETTING): value_of(text) for name, text in given.items() if name.startswith(SETTING)}
