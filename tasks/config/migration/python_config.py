# SPDX-License-Identifier: Apache-2.0
"""The settings that a Python configuration function makes: `config.a.b = value`, as flow_grpo's and DiffusionNFT's do.

The file is read, not run. Of Python it knows assignments, numbers, texts, lists and dicts, sums and comparisons of
them, `if`, `while`, `int(...)`, and calls of functions of the same file or of another one beside it. Anything else, as
`os.path.join(...)`, is not known, and neither is what hangs on it.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.config.errors import ConfigError
from tasks.config.migration.script import Override

COMPUTED = "$COMPUTED"
"""Stands for a value that is not known."""
MOST_STATEMENTS = 10_000
DEEPEST = 20
MOST_DIGITS = 10**15
MOST_ENTRIES = 256
"""Of a list or a mapping with all that is in it: one may hold another twice, which holds one twice, and so on."""
GPUS = ("gpu_number", "n_gpus")
"""What the number of GPUs is called in their functions, where it is no setting."""
NAMES: dict[str, Callable[..., Any]] = {"int": int, "float": float, "max": max, "min": min, "round": round, "len": len}
OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
CONFIG_OPTION = re.compile(r"--config[= ]+(?P<file>\S+\.py)(?::(?P<function>\w+))?")
PROCESSES = re.compile(r"--num_processes[= ]+(?P<number>\d+)")


@dataclass(frozen=True)
class Section:
    """The config, or a part of it, by the path from its root."""

    path: str = ""


@dataclass
class _Reader:
    """Runs the statements of functions, in its own words.

    Attributes:
        functions: of the file, by name.
        beside: the name of another file's module -> its functions.
        settings: path -> value, in the order in which they were first given.
        gpus: as the outermost function that says it does.
    """

    functions: Mapping[str, ast.FunctionDef]
    beside: Mapping[str, Mapping[str, ast.FunctionDef]]
    settings: dict[str, Any] = field(default_factory=dict)
    gpus: Any = None
    statements: int = 0

    def call(self, function: ast.FunctionDef, arguments: Mapping[str, Any], depth: int = 0) -> Any:
        """What the function returns."""
        names = [argument.arg for argument in function.args.args]
        defaults = dict(zip(names[::-1], function.args.defaults[::-1], strict=False))
        local = {name: self.value(default, {}, depth) for name, default in defaults.items()} | dict(arguments)
        local |= {name: COMPUTED for name in names if name not in local}
        local.setdefault("config", Section())
        returned: list[Any] = []
        if depth < DEEPEST:
            self._run(function.body, local, depth, returned)
        self.gpus = next((local[name] for name in GPUS if name in local), self.gpus)
        return returned[0] if returned else None

    def _run(self, body: list[ast.stmt], local: dict[str, Any], depth: int, returned: list[Any]) -> bool:
        """False where a `return` or `break` ended it."""
        for statement in body:
            self.statements += 1
            if self.statements > MOST_STATEMENTS:
                raise ConfigError(f"line {statement.lineno}: more than {MOST_STATEMENTS} statements: mend its loops")
            if isinstance(statement, ast.Return):
                returned.append(self.value(statement.value, local, depth) if statement.value else None)
                return False
            if isinstance(statement, ast.Break):
                return False
            if not self._statement(statement, local, depth, returned):
                return False
        return True

    def _statement(self, statement: ast.stmt, local: dict[str, Any], depth: int, returned: list[Any]) -> bool:
        if isinstance(statement, ast.Assign):
            self._assign(statement.targets, statement.value, local, depth)
        elif isinstance(statement, ast.AugAssign):
            both = ast.BinOp(_read(statement.target), statement.op, statement.value)
            self._assign([statement.target], both, local, depth)
        elif isinstance(statement, ast.If):
            holds = self.value(statement.test, local, depth)
            if holds is COMPUTED:
                self._forget([*statement.body, *statement.orelse], local)
            else:
                return self._run(statement.body if holds else statement.orelse, local, depth, returned)
        elif isinstance(statement, ast.While):
            return self._loop(statement, local, depth, returned)
        elif isinstance(statement, ast.For | ast.With | ast.Try):
            self._forget([statement], local)
        return True

    def _loop(self, loop: ast.While, local: dict[str, Any], depth: int, returned: list[Any]) -> bool:
        if any(isinstance(node, ast.Continue) for node in ast.walk(loop)):
            self._forget(loop.body, local)
            return True
        while (holds := self.value(loop.test, local, depth)) and holds is not COMPUTED:
            if not self._run(loop.body, local, depth, returned):
                return not returned
        if holds is COMPUTED:
            self._forget(loop.body, local)
        return True

    def _forget(self, body: list[ast.stmt], local: dict[str, Any]) -> None:
        """What these statements may set is not known."""
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                self._set(node, COMPUTED, local)

    def _assign(self, targets: list[ast.expr], value: ast.expr, local: dict[str, Any], depth: int) -> None:
        attributes = [path for target in targets if (path := self._path(target, local)) is not None]
        is_section = isinstance(value, ast.Call) and ast.unparse(value.func).endswith("ConfigDict")
        made = Section(attributes[0] if attributes else "") if is_section else self.value(value, local, depth)
        for target in targets:
            is_unset = isinstance(made, Section) and not is_section and isinstance(target, ast.Attribute)
            self._set(target, COMPUTED if is_unset else made, local)

    def _set(self, target: ast.expr, value: Any, local: dict[str, Any]) -> None:
        path = self._path(target, local)
        if isinstance(target, ast.Name):
            local[target.id] = value
        elif path is not None and not isinstance(value, Section):
            self.settings[path] = value

    def _path(self, target: ast.expr, local: Mapping[str, Any]) -> str | None:
        """Of an attribute of the config, dotted."""
        *names, leaf = _dotted(target)
        root = local.get(names[0]) if names else None
        return ".".join(filter(None, (root.path, *names[1:], leaf))) if isinstance(root, Section) else None

    def value(self, node: ast.expr, local: Mapping[str, Any], depth: int) -> Any:
        """An expression's value; COMPUTED where it is not known."""
        try:
            made = self._value(node, local, depth)
        except (TypeError, ValueError, ArithmeticError, LookupError):
            return COMPUTED
        if isinstance(made, int | float):
            return COMPUTED if abs(made) > MOST_DIGITS else made
        return COMPUTED if _entries(made) > MOST_ENTRIES else made

    def _value(self, node: ast.expr, local: Mapping[str, Any], depth: int) -> Any:
        def of(part: ast.expr) -> Any:
            return self.value(part, local, depth)

        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return local.get(node.id, COMPUTED)
        if isinstance(node, ast.Attribute):
            path = self._path(node, local)
            return COMPUTED if path is None else self.settings.get(path, Section(path))
        if isinstance(node, ast.List | ast.Tuple):
            return [of(entry) for entry in node.elts]
        if isinstance(node, ast.Dict):
            return {of(key): of(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
        if isinstance(node, ast.Call):
            return self._called(node, of, depth)
        if isinstance(node, ast.IfExp):
            holds = of(node.test)
            return COMPUTED if holds is COMPUTED else of(node.body if holds else node.orelse)
        parts = [of(part) for part in _parts(node)]
        if not parts or any(part is COMPUTED or isinstance(part, Section) for part in parts):
            return COMPUTED
        return _operated(node, parts)

    def _called(self, node: ast.Call, of: Callable[[ast.expr], Any], depth: int) -> Any:
        *module, name = _dotted(node.func)
        functions = self.functions if not module else self.beside.get(".".join(module), {})
        arguments = [of(argument) for argument in node.args]
        if name in functions:
            names = [argument.arg for argument in functions[name].args.args]
            keywords = {keyword.arg: of(keyword.value) for keyword in node.keywords if keyword.arg}
            return self.call(functions[name], dict(zip(names, arguments, strict=False)) | keywords, depth + 1)
        known = not module and name in NAMES and not any(argument is COMPUTED for argument in arguments)
        return NAMES[name](*arguments) if known else COMPUTED


def named_by(script: str) -> tuple[str, str | None, int | None] | None:
    """The configuration file, its function and the number of processes of a command in a shell script, if there are."""
    lines = [line.partition("#")[0] for line in script.replace("\\\n", " ").splitlines()]
    text = next((line for line in lines if CONFIG_OPTION.search(line)), "")
    found, processes = CONFIG_OPTION.search(text), PROCESSES.search(text)
    if found is None:
        return None
    return found["file"], found["function"], int(processes["number"]) if processes else None


def read_config(file: Path, function: str | None, processes: int | None = None) -> list[Override]:
    """All settings of a function's config, or of the file's own lines, with the number of GPUs as `gpus`.

    Raises:
        ConfigError: the file or the function is not there, is no Python, or sets nothing.
    """
    tree = _parsed(file)
    functions = _functions(tree)
    reader = _Reader(functions, {name: _functions(_parsed(other)) for name, other in _beside(tree, file)})
    chosen = _chosen(file, function, functions) or ast.FunctionDef("file", _NO_ARGUMENTS, tree.body, [])
    try:
        reader.call(chosen, {})
    except ConfigError as error:
        raise ConfigError(f"{file}, {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file} has sums too long to be read: write shorter ones") from error
    if not reader.settings:
        raise ConfigError(f"{file} holds no line of the form config.field = value there: give a function that has some")
    gpus = processes or reader.gpus
    settings = ({"gpus": gpus} if gpus is not None else {}) | reader.settings
    return [Override(path, value) for path, value in settings.items()]


_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def _chosen(file: Path, name: str | None, functions: Mapping[str, ast.FunctionDef]) -> ast.FunctionDef | None:
    """The one that is named, or that alone wants no arguments; None where there is none."""
    offered = [function for function, node in functions.items() if not node.args.args]
    if name is None and len(offered) > 1:
        raise ConfigError(f"{file} has {len(offered)} configurations: give one as {file}:NAME, of {', '.join(offered)}")
    if name is None:
        return functions[offered[0]] if offered else None
    if name not in functions:
        raise ConfigError(f"{file} has no function {name}: give one of {', '.join(offered) or 'another file'}")
    return functions[name]


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text())
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{file} cannot be read as Python ({error}): give the configuration's file") from error


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _beside(tree: ast.Module, file: Path) -> Iterator[tuple[str, Path]]:
    """Other Python files in its folder that it loads or imports, with the names that it gives them."""
    named = list[tuple[str, str]]()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            texts = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            files = [Path(text).name for text in texts if isinstance(text, str) and text.endswith(".py")]
            named += [(target.id, name) for target in node.targets if isinstance(target, ast.Name) for name in files]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            named += [(alias.asname or alias.name, f"{alias.name.rpartition('.')[2]}.py") for alias in node.names]
    for name, found in named:
        if found != file.name and (file.parent / found).is_file():
            yield name, file.parent / found


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _entries(value: Any) -> int:
    """How many values are in it, itself among them."""
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return 1 + sum(map(_entries, inner))


def _read(target: ast.expr) -> ast.expr:
    """The same name, to be read."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _parts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return [node.left, node.comparators[0]]
    if isinstance(node, ast.BoolOp):
        return list(node.values)
    return [node.operand] if isinstance(node, ast.UnaryOp) else []


def _operated(node: ast.expr, parts: list[Any]) -> Any:
    if isinstance(node, ast.BoolOp):
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.UnaryOp):
        return not parts[0] if isinstance(node.op, ast.Not) else -parts[0]
    if isinstance(node, ast.BinOp) and not all(isinstance(part, int | float) for part in parts):
        return COMPUTED
    op = node.ops[0] if isinstance(node, ast.Compare) else node.op if isinstance(node, ast.BinOp) else None
    return OPERATIONS[type(op)](*parts)
