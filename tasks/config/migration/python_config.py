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
from tasks.config.migration.script import Override, commands, value_of

COMPUTED = "$COMPUTED"
"""Stands for a value that is not known."""
LOCKS = ("lock", "unlock")
"""Methods of a config that set nothing."""
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
CONFIG_FILE = re.compile(r"^(?P<file>\S+\.py)(?::(?P<function>\w+))?$")
SETTING = "config."
"""Begins an option of a command line that gives one setting another value, once the function has made all."""
PROCESSES, PER_NODE, NODES = ("num_processes",), ("nproc_per_node", "nproc-per-node"), ("nnodes",)
"""Options of accelerate's launcher, and of torchrun's two."""


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
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign([statement.target], statement.value, local, depth)
        elif isinstance(statement, ast.Expr):
            self._do(statement.value, local, depth)
        elif isinstance(statement, ast.Delete):
            self._forget([statement], local)
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
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                self._set(node, COMPUTED, local)

    def _do(self, node: ast.expr, local: dict[str, Any], depth: int) -> None:
        """A call for what it does: of a function that is given the config, a method of the config, or `setattr`."""
        path = self._path(node.func, local) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and (path is not None or ast.unparse(node.func) == "setattr"):
            given = [self.value(argument, local, depth) for argument in node.args]
            named = {word.arg: self.value(word.value, local, depth) for word in node.keywords}
            if path is not None:
                self._call_method(path, given, named)
            elif len(given) == 3 and isinstance(given[0], Section):
                self.settings[_joined(given[0].path, given[1])] = given[2]
        else:
            self.value(node, local, depth)

    def _call_method(self, path: str, given: list[Any], named: dict[str | None, Any]) -> None:
        """`update` sets what it is given; of any other method it is told that what it sets is not known."""
        above, _, method = path.rpartition(".")
        if method == "update" and None not in named and all(isinstance(one, dict) for one in given):
            for mapping in (*given, named):
                self.settings |= {_joined(above, key): value for key, value in mapping.items()}
        elif method not in LOCKS:
            self.settings[path] = COMPUTED

    def _assign(self, targets: list[ast.expr], value: ast.expr, local: dict[str, Any], depth: int) -> None:
        attributes = [path for target in targets if (path := self._path(target, local)) is not None]
        is_section = isinstance(value, ast.Call) and ast.unparse(value.func).endswith("ConfigDict")
        made = Section(attributes[0] if attributes else "") if is_section else self.value(value, local, depth)
        for target in targets:
            is_unset = isinstance(made, Section) and not is_section and isinstance(target, ast.Attribute)
            self._set(target, COMPUTED if is_unset else made, local)

    def _set(self, target: ast.expr, value: Any, local: dict[str, Any]) -> None:
        path = self._path(target, local)
        if isinstance(target, ast.Tuple | ast.List):
            fits = isinstance(value, list) and len(value) == len(target.elts)
            for part, one in zip(target.elts, value if fits else [COMPUTED] * len(target.elts), strict=True):
                self._set(part, one, local)
        elif isinstance(target, ast.Name):
            local[target.id] = value
        elif path is not None and not isinstance(value, Section):
            above, _, key = path.rpartition(".")
            mapping = self.settings.get(above)
            if isinstance(mapping, dict):
                path, value = above, mapping | {key: value}
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
        if isinstance(node, ast.Attribute | ast.Subscript):
            path = self._path(node, local)
            return COMPUTED if path is None else self.settings.get(path, Section(path))
        if isinstance(node, ast.List | ast.Tuple):
            return [of(entry) for entry in node.elts]
        if isinstance(node, ast.Dict):
            # The key of `**more` is none, and so COMPUTED.
            return {of(key): of(value) for key, value in zip(node.keys, node.values, strict=True)}  # type: ignore[arg-type]
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
    """The command of a shell script that names a configuration, if there is one.

    Raises:
        ConfigError: there are several, of different runs.
    """
    starts = list[Start]()
    for words, _ in commands(script, source):
        given = _options(words)
        found = CONFIG_FILE.match(given.get("config", ""))
        if found and (start := Start(found["file"], found["function"], _gpus(given), _settings(given))) not in starts:
            starts.append(start)
    if len(starts) > 1:
        named = ", ".join(f"{start.file}:{start.function}" for start in starts)
        raise ConfigError(f"{source} starts {len(starts)} runs ({named}): give one of them")
    return starts[0] if starts else None


def _options(words: list[str]) -> dict[str, str]:
    """Name -> value of `--name=value` and `--name value`; `true` where it has none."""
    found: dict[str, str] = {}
    for word, follows in zip(words, [*words[1:], "--"], strict=True):
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


def read_config(file: Path, function: str | None, start: Start | None = None) -> list[Override]:
    """All settings of a function's config, or of the file's own lines, with the number of GPUs as `gpus`; what the
    command that starts it says goes before.

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
    gpus = reader.gpus if start is None or start.gpus is None else start.gpus
    settings = ({"gpus": gpus} if gpus is not None else {}) | reader.settings | dict(start.settings if start else {})
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


def _joined(above: str, key: Any) -> str:
    return f"{above}.{key}" if above else str(key)


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return [*_dotted(node.value), node.slice.value]
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
    if isinstance(node, ast.BoolOp):  # the value that decides it, as in `given or 10`
        decides = (part for part in parts if bool(part) is isinstance(node.op, ast.Or))
        return next(decides, parts[-1])
    if isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.Not):
            return not parts[0]
        return parts[0] if isinstance(node.op, ast.UAdd) else -parts[0]
    if isinstance(node, ast.BinOp) and not all(isinstance(part, int | float) for part in parts):
        return COMPUTED
    op = node.ops[0] if isinstance(node, ast.Compare) else node.op if isinstance(node, ast.BinOp) else None
    return OPERATIONS[type(op)](*parts)
