# SPDX-License-Identifier: Apache-2.0
"""The settings that a Python configuration function makes: `config.a.b = value`, as flow_grpo's and DiffusionNFT's do.

The file is read, not run. Of Python it knows assignments, numbers, texts, lists and dicts, `dict(...)` and
`ConfigDict(...)`, sums and comparisons of them, `if`, `while`, `int(...)`, and calls of functions of the same file or
of another one beside it. Anything else, as `os.path.join(...)`, is not known, and neither is what hangs on it: what a
statement or a function that is not known may set is no longer known either.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.config.errors import ConfigError
from tasks.config.migration.script import Override
from tasks.config.migration.starting_command import Start

COMPUTED = "$COMPUTED"
"""Stands for a value that is not known."""
READING = frozenset({"lock", "unlock", "unlocked", "get", "items", "keys", "values", "to_dict", "to_json", "to_yaml"})
"""Methods of a config that set nothing in it."""
SHOWING = frozenset({"print", "str", "repr", "isinstance", "hasattr", "getattr", "type", "id", "list", "sorted"})
"""Functions that set nothing in a config that they are given."""
TELLING = frozenset({"pprint", "pformat", "info", "debug", "warning", "log", "dumps", "makedirs"})
"""Others, which may be a module's or an object's too."""
COPYING = frozenset({"copy", "deepcopy", "copy_and_resolve_references"})
"""Functions of a config, or its methods, that make another one of the same settings."""
CHANGING = frozenset({"append", "extend", "insert", "update", "setdefault", "pop", "popitem", "remove", "clear"})
"""Methods of a list or a dict after which it is another one."""
CALLED = "(...)"
"""Ends the path of what stands for a call that may have set anything."""
WHOLE = f"ConfigDict{CALLED}"
"""Stands for a config that is made of what is not known."""
MAPPINGS = ("reward_fn", "prompt_fn_kwargs")
"""Settings that are a mapping each; any other mapping is a section of settings."""
APART = "?"
"""Begins the path of a section that has no place in the config yet."""
INITIAL = "initial_dictionary"
DICT_ARGUMENTS = ("type_safe", "convert_dict", "allow_dotted_keys", "sort_keys")
"""Arguments of ConfigDict that are no settings."""
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


@dataclass(frozen=True)
class Section:
    """The config, or a part of it, by the path from its root, or from one of a section that stands apart."""

    path: str = ""


@dataclass
class _Reader:
    """Runs the statements of functions, in its own words.

    Attributes:
        functions: of the file, by name.
        beside: the name of another file's module -> its functions.
        settings: path -> value, in the order in which they were first given.
        places: the first part of a section's path that stood apart -> the path of where it is now.
        inner: functions within a function, by name; they are not run.
        copies: the paths of sections that stood apart as a copy of another one.
        config: what the outermost function calls so at its end.
        gpus: as the outermost function that says it does.
    """

    functions: Mapping[str, ast.FunctionDef]
    beside: Mapping[str, Mapping[str, ast.FunctionDef]]
    settings: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    inner: dict[str, ast.AST] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    config: Section = field(default_factory=Section)
    gpus: Any = None
    statements: int = 0
    apart: int = 0

    def run(self, function: ast.FunctionDef) -> dict[str, Any]:
        """All settings of the config that the function returns, or of the one that it sets without returning any."""
        returned = self.call(function, {})
        if isinstance(returned, dict):
            self._fill("", returned)
        root = self._place(returned) if isinstance(returned, Section) else ""
        aside = self.copies - {self.config.path}
        made: dict[str, Any] = {}
        for path, value in self.settings.items():
            if path.startswith(f"{root}.") or not path.startswith(APART):
                made[path.removeprefix(f"{root}.")] = value
            elif path == root or (not isinstance(returned, Section) and path.partition(".")[0] not in aside):
                made[path.partition(".")[2] or WHOLE] = value
        return _by_field(made)

    def call(self, function: ast.FunctionDef, arguments: Mapping[str, Any], depth: int = 0) -> Any:
        """What the function returns."""
        names = [argument.arg for argument in function.args.args]
        defaults = dict(zip(names[::-1], function.args.defaults[::-1], strict=False))
        local = {name: self.value(default, {}, depth) for name, default in defaults.items()} | dict(arguments)
        local |= {name: COMPUTED for name in names if name not in local}
        local.setdefault("config", Section())
        returned: list[Any] = []
        self._run(function.body, local, depth, returned)
        self.config = local["config"] if isinstance(local["config"], Section) else Section()
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
        elif isinstance(statement, ast.AugAssign):
            both = ast.BinOp(_read(statement.target), statement.op, statement.value)
            self._assign([statement.target], both, local, depth)
        elif isinstance(statement, ast.If):
            holds = self._holds(statement.test, local, depth)
            if holds is COMPUTED:
                self._forget([*statement.body, *statement.orelse], local)
            else:
                return self._run(statement.body if holds else statement.orelse, local, depth, returned)
        elif isinstance(statement, ast.While):
            return self._loop(statement, local, depth, returned)
        else:
            self._pass_over(statement, local)
        return True

    def _pass_over(self, statement: ast.stmt, local: dict[str, Any]) -> None:
        """One that is not run. A mere annotation sets nothing; a function of the file is run where it is called."""
        if isinstance(statement, ast.AnnAssign) or statement in self.functions.values():
            return
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            self.inner[statement.name] = statement
        self._forget([statement], local)

    def _loop(self, loop: ast.While, local: dict[str, Any], depth: int, returned: list[Any]) -> bool:
        if any(isinstance(node, ast.Continue) for node in ast.walk(loop)):
            self._forget(loop.body, local)
            return True
        while (holds := self._holds(loop.test, local, depth)) and holds is not COMPUTED:
            if not self._run(loop.body, local, depth, returned):
                return not returned
        if holds is COMPUTED:
            self._forget(loop.body, local)
        return True

    def _holds(self, test: ast.expr, local: dict[str, Any], depth: int) -> Any:
        """Whether a condition holds; COMPUTED where it is not known, or hangs on a field that nothing has set."""
        value = self.value(test, local, depth)
        return COMPUTED if value is COMPUTED or isinstance(value, Section) else bool(value)

    def _forget(self, body: Sequence[ast.AST], local: dict[str, Any]) -> None:
        """What these statements or expressions may set is not known."""
        for node in (node for part in body for node in ast.walk(part)):
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                self._set(node, COMPUTED, local)
            elif isinstance(node, ast.Call):
                self._hand_over(node, local)
            elif isinstance(bound := getattr(node, "name", None), str):  # of `except`, `case` and `def`
                self._set(ast.Name(bound, ast.Store()), COMPUTED, local)
            for other_name in _renamed(node):
                for path in self._sections(other_name, local):
                    self._lose(path)

    def _hand_over(self, call: ast.Call, local: dict[str, Any]) -> None:
        """What a call that is not run may set is not known: in the sections that it is given, and in its own list."""
        name = _dotted(call.func)[-1]
        path = self._path(call.func, local)
        if self._sets_nothing(call, local):
            if isinstance(call.func, ast.Attribute):
                self._change(call.func, local)
            return
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if isinstance(call.func, ast.Attribute):
            given.append(call.func.value)
            self._change(call.func, local)
        sections = {section for part in given for section in self._sections(part, local)}
        for section in sections:
            self._lose(section)
        if sections:
            self._note(call, path)
        if function := self.inner.pop(name, None):  # one that calls itself does no more than it does once
            self._forget([function], local)
            self.inner[name] = function

    def _sets_nothing(self, call: ast.Call, local: Mapping[str, Any]) -> bool:
        """By its name: it shows or copies the config that it is given, or puts it into what is none."""
        *above, name = _dotted(call.func)
        own = self.beside.get(".".join(above), {}) if above else {**self.functions, **self.inner}
        if name in own:
            return False
        if name in COPYING or name in (READING if above else (*SHOWING, *NAMES)):
            return True
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        of_config = self._path(call.func, local) is not None or (receiver and any(self._sections(receiver, local)))
        return not of_config and (name in TELLING or (receiver is not None and name == "update"))

    def _change(self, method: ast.Attribute, local: dict[str, Any]) -> None:
        """A list or a dict is another one after some of its methods."""
        whole, path = method.value, self._path(method.value, local)
        found = local.get(whole.id) if isinstance(whole, ast.Name) else self.settings.get(path or "")
        if method.attr in CHANGING and isinstance(found, list | dict):
            self._set(whole, COMPUTED, local)

    def _note(self, call: ast.Call, path: str | None = None) -> None:
        """That there is a call that may have set anything."""
        self.settings[f"{ast.unparse(call.func)}{CALLED}" if path is None else path] = COMPUTED

    def _sections(self, node: ast.expr, local: Mapping[str, Any]) -> Iterator[str]:
        """Paths of the sections that come out of an expression, of which no call is run."""
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            root = local.get(node.id) if isinstance(node, ast.Name) else None
            path = self._place(root) if isinstance(root, Section) else self._path(node, local)
            if path is not None and isinstance(self._read(path), Section) and self._has_fields(path):
                yield path
        elif not isinstance(node, ast.Call | ast.Compare | ast.JoinedStr):
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr):
                    yield from self._sections(part, local)

    def _has_fields(self, path: str) -> bool:
        """Is it the config, or was something set below it, or was it made as a section?"""
        made = (self._place(Section(place)) for place in self.places.values())
        return not path or _is_apart(path) or bool(self._below(path)) or path in made

    def _lose(self, path: str) -> None:
        """What is below is not known."""
        for below in self._below(path):
            self.settings[below] = COMPUTED

    def _below(self, path: str) -> list[str]:
        if not path:
            return [other for other in self.settings if not other.startswith(APART)]
        return [other for other in self.settings if other.startswith(f"{path}.")]

    def _do(self, node: ast.expr, local: dict[str, Any], depth: int) -> None:
        """A call for what it does: of a function that is given the config, a method of the config, or `setattr`."""
        path = self._path(node.func, local) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or (path is None and ast.unparse(node.func) != "setattr"):
            self.value(node, local, depth)
            return
        given = [self.value(argument, local, depth) for argument in node.args]
        named = {word.arg: self.value(word.value, local, depth) for word in node.keywords}
        if path is None and len(given) == 3 and isinstance(given[0], Section) and isinstance(given[1], str):
            section = self._place(given[0])
            if given[1] is COMPUTED:
                self._lose(section)
            self._put(_joined(section, given[1]), given[2])
        elif path is None or not self._updated(path, given, named):
            self._hand_over(node, local)

    def _updated(self, path: str, given: list[Any], named: dict[str | None, Any]) -> bool:
        """Is it a config's method `update` with what is known? Then it is done."""
        above, _, method = path.rpartition(".")
        mappings = [*map(self._entries_of, given), named]
        if method != "update" or None in named or None in mappings:
            return False
        for mapping in filter(None, mappings):
            self._fill(above, mapping)
        return True

    def _assign(self, targets: list[ast.expr], value: ast.expr, local: dict[str, Any], depth: int) -> None:
        made = self.value(value, local, depth)
        for target in targets:
            was = local.get(target.id) if isinstance(target, ast.Name) else None
            if made is COMPUTED and isinstance(was, Section) and isinstance(value, ast.Call):
                self._note(value)
            self._set(target, made, local)

    def _set(self, target: ast.expr, value: Any, local: dict[str, Any]) -> None:
        path = self._path(target, local)
        if isinstance(target, ast.Tuple | ast.List):
            fits = isinstance(value, list) and len(value) == len(target.elts)
            for part, one in zip(target.elts, value if fits else [COMPUTED] * len(target.elts), strict=True):
                self._set(part, one, local)
        elif isinstance(target, ast.Name):
            was = local.get(target.id)
            if value is COMPUTED and isinstance(was, Section):  # a config that goes through a function, most likely
                self._lose(self._place(was))
            else:
                local[target.id] = value
        elif path is not None:
            self._put(path, value)
        elif isinstance(target, ast.Attribute | ast.Subscript):
            self._set_part(target, value, local)

    def _set_part(self, target: ast.Attribute | ast.Subscript, value: Any, local: dict[str, Any]) -> None:
        """Of something that is no section, or by a name that is not known."""
        whole, *names = _dotted(target)
        if isinstance(local.get(whole), dict) and len(names) == 1:
            local[whole] = local[whole] | {names[0]: value}
            return
        above = target.value
        if isinstance(above, ast.Attribute | ast.Subscript) and self._path(above, local) is None:
            self._set_part(above, COMPUTED, local)
        elif self._path(above, local) in self.settings:
            self._set(above, COMPUTED, local)
        elif isinstance(above, ast.Name) and isinstance(local.get(above.id), list | dict):
            local[above.id] = COMPUTED
        else:
            for path in self._sections(above, local):
                self._lose(path)
                self.settings[ast.unparse(target)] = COMPUTED
            self._forget([above], local)

    def _put(self, path: str, value: Any) -> None:
        """Sets a field or a section; what was below it is gone, or as little known as its new value."""
        above, _, key = path.rpartition(".")
        mapping = self.settings.get(above)
        if isinstance(value, Section):
            self._move(value, path)
            return
        value = _without_sections(value)
        if isinstance(mapping, dict):
            path, value = above, mapping | {key: value}
        for below in self._below(path):
            self.settings[below] = COMPUTED
            if value is not COMPUTED:
                del self.settings[below]
        self.settings[path] = value

    def _move(self, section: Section, path: str) -> None:
        """Gives a section that stands apart its place; of any other, what it is there is not known."""
        apart = self._place(section)
        if not _is_apart(apart) or path.partition(".")[0] == apart:
            self._put(path, COMPUTED)
            return
        for below in (path, *self._below(path)):
            self.settings.pop(below, None)
        self.places[apart] = path
        moved = {apart, *self._below(apart)}
        self.settings = {
            f"{path}{name.removeprefix(apart)}" if name in moved else name: value
            for name, value in self.settings.items()
        }

    def _place(self, section: Section) -> str:
        """Where a section is now."""
        path = section.path
        while (first := path.partition(".")[0]) in self.places:
            path = f"{self.places[first]}{path.removeprefix(first)}"
        return path

    def _fill(self, path: str, mapping: Mapping[Any, Any]) -> None:
        """Makes the entries of a mapping fields of a section, and those of a mapping in it fields of one below."""
        if COMPUTED in mapping:
            self._lose(path)
            self.settings[path or WHOLE] = COMPUTED
            return
        for key, value in mapping.items():
            below = _joined(path, key)
            if isinstance(value, dict) and not isinstance(self.settings.get(below), dict):
                self._fill(below, value)
            elif isinstance(value, dict):
                self._put(below, self.settings[below] | value)
            else:
                self._put(below, value)

    def _entries_of(self, value: Any) -> dict[Any, Any] | None:
        """Of a dict, or of a section that stands apart or has settings; None where they are not known."""
        if isinstance(value, dict):
            return value
        if not isinstance(value, Section):
            return None
        path = self._place(value)
        found = {below.removeprefix(f"{path}."): self.settings[below] for below in self._below(path)}
        return found if found or _is_apart(path) else None

    def _path(self, target: ast.expr, local: Mapping[str, Any]) -> str | None:
        """Of an attribute of the config, dotted."""
        *names, leaf = _dotted(target)
        root = local.get(names[0]) if names else None
        return ".".join(filter(None, (self._place(root), *names[1:], leaf))) if isinstance(root, Section) else None

    def _read(self, path: str) -> Any:
        """A field's value; a section where it has none."""
        above, _, key = path.rpartition(".")
        mapping = self.settings.get(above)
        if isinstance(mapping, dict):
            return mapping.get(key, COMPUTED)
        value = self.settings.get(path, Section(path))
        return Section(path) if value is COMPUTED and self._has_fields(path) else value

    def value(self, node: ast.expr, local: dict[str, Any], depth: int) -> Any:
        """An expression's value; COMPUTED where it is not known."""
        try:
            made = self._value(node, local, depth)
        except (TypeError, ValueError, ArithmeticError, LookupError):
            return COMPUTED
        if isinstance(made, int | float):
            return COMPUTED if abs(made) > MOST_DIGITS else made
        return COMPUTED if _entries(made) > MOST_ENTRIES else made

    def _value(self, node: ast.expr, local: dict[str, Any], depth: int) -> Any:
        def of(part: ast.expr) -> Any:
            return self.value(part, local, depth)

        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return local.get(node.id, COMPUTED)
        if (path := self._path(node, local)) is not None:
            return self._read(path)
        if isinstance(node, ast.List | ast.Tuple):
            return [of(entry) for entry in node.elts]
        if isinstance(node, ast.Dict):
            return self._dict(node, of)
        if isinstance(node, ast.Call):
            return self._called(node, local, depth)
        if isinstance(node, ast.IfExp) and (holds := self._holds(node.test, local, depth)) is not COMPUTED:
            return of(node.body if holds else node.orelse)
        parts = [of(part) for part in _parts(node)]
        if not parts:
            self._forget([node], local)
        known = parts and not any(part is COMPUTED or isinstance(part, Section) for part in parts)
        return _operated(node, parts) if known else COMPUTED

    def _dict(self, node: ast.Dict, of: Callable[[ast.expr], Any]) -> dict[Any, Any]:
        """Its entries; one of the key COMPUTED stands for more, which are not known."""
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                entries = self._entries_of(of(value))
                made |= {COMPUTED: COMPUTED} if entries is None else entries
            else:
                made[of(key)] = of(value)
        return made

    def _called(self, node: ast.Call, local: dict[str, Any], depth: int) -> Any:
        def of(part: ast.expr) -> Any:
            return self.value(part, local, depth)

        *module, name = _dotted(node.func)
        functions = self.functions if not module else self.beside.get(".".join(module), {})
        if name not in self.inner and name in functions and depth + 1 < DEEPEST:
            names = [argument.arg for argument in functions[name].args.args]
            keywords = {keyword.arg: of(keyword.value) for keyword in node.keywords if keyword.arg}
            given = dict(zip(names, map(of, node.args), strict=False)) | keywords
            return self.call(functions[name], given, depth + 1)
        if name.endswith("ConfigDict"):
            return self._config_dict(node, of)
        if name in COPYING and name not in self.inner and (copied := _copied(node)):
            return self._copy(of(copied))
        if not module and name == "dict":
            return self._mapping(node, of)
        arguments = [of(part) for part in (*node.args, *(keyword.value for keyword in node.keywords))]
        if not module and name in NAMES:
            known = not node.keywords and not any(argument is COMPUTED for argument in arguments)
            return NAMES[name](*arguments) if known else COMPUTED
        self._hand_over(node, local)
        return COMPUTED

    def _copy(self, value: Any) -> Any:
        """Of a section one that stands apart, with the same settings; of anything else the same."""
        if not isinstance(value, Section) or not self._has_fields(self._place(value)):
            return value
        self.apart += 1
        path, apart = self._place(value), f"{APART}{self.apart}"
        if path in self.settings:
            self.settings[apart] = self.settings[path]
        for below in self._below(path):
            self.settings[_joined(apart, below.removeprefix(f"{path}.") if path else below)] = self.settings[below]
        self.copies.add(apart)
        return Section(apart)

    def _config_dict(self, node: ast.Call, of: Callable[[ast.expr], Any]) -> Section:
        """A section that stands apart, with what it is given; it is COMPUTED where that is not known."""
        self.apart += 1
        section = Section(f"{APART}{self.apart}")
        mapping = self._mapping(node, of)
        initial = mapping.pop(INITIAL, {}) if mapping is not COMPUTED else COMPUTED
        entries = {} if initial is None else self._entries_of(initial)
        if entries is None:
            self.settings[section.path] = COMPUTED
            return section
        self._fill(section.path, entries | {key: value for key, value in mapping.items() if key not in DICT_ARGUMENTS})
        return section

    def _mapping(self, node: ast.Call, of: Callable[[ast.expr], Any]) -> Any:
        """What `dict` makes of the call's arguments: a dict; COMPUTED where one of them is not known."""
        made: dict[Any, Any] = {}
        for argument in [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg is None)]:
            value = of(argument)
            entries = {} if value is None else self._entries_of(value)
            if entries is None or COMPUTED in entries:
                return COMPUTED
            made |= entries
        return made | {keyword.arg: of(keyword.value) for keyword in node.keywords if keyword.arg}


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
        made = reader.run(chosen)
    except ConfigError as error:
        raise ConfigError(f"{file}, {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file} has sums too long to be read: write shorter ones") from error
    if not made:
        raise ConfigError(f"{file} holds no line of the form config.field = value there: give a function that has some")
    gpus = reader.gpus if start is None or start.gpus is None else start.gpus
    settings = ({"gpus": gpus} if gpus is not None else {}) | made | dict(start.settings if start else {})
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


def _by_field(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping that is a section as its fields, and the fields of a section that is a mapping as one."""
    made: dict[str, Any] = {}
    for path, value in settings.items():
        whole = next((mapping for mapping in MAPPINGS if path.startswith(f"{mapping}.")), None)
        if whole is not None and made.get(whole) is not COMPUTED:
            made[whole] = made.get(whole, {}) | {path.removeprefix(f"{whole}."): value}
        elif whole is None and isinstance(value, dict) and path not in MAPPINGS and COMPUTED not in value:
            made |= _by_field({_joined(path, key): one for key, one in value.items()})
        elif whole is None:
            made[path] = value
    return made


def _is_apart(path: str) -> bool:
    """Is it the whole of a section that has no place in the config yet?"""
    return path.startswith(APART) and "." not in path


def _renamed(node: ast.AST) -> list[ast.expr]:
    """What gets another name there, by which it may then be set."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        return [node.value] if node.value is not None else []
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        return [node.iter]
    if isinstance(node, ast.Match):
        return [node.subject]
    return [node.context_expr] if isinstance(node, ast.withitem) else []


def _joined(above: str, key: Any) -> str:
    return f"{above}.{key}" if above else str(key)


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return [*_dotted(node.value), node.slice.value]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _copied(call: ast.Call) -> ast.expr | None:
    """What a call that copies is given: its argument, or that of which it is a method."""
    return call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None


def _entries(value: Any) -> int:
    """How many values are in it, itself among them."""
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return 1 + sum(map(_entries, inner))


def _without_sections(value: Any) -> Any:
    """What a section in a list or a dict holds is not known."""
    if isinstance(value, dict):
        return {key: _without_sections(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_sections(one) for one in value]
    return COMPUTED if isinstance(value, Section) else value


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
