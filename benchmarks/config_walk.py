# SPDX-License-Identifier: Apache-2.0
"""How often the config changes floors on its way from `train`, counted by reading the source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = ("flows", "tasks", "models")
START = ("flows.train", "train")
CONFIG = {"TrainConfig", "Recipe"}
Types = dict[str, set[str]]


@cache
def modules() -> dict[str, ast.Module]:
    """Name of a module -> its source."""
    paths = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text()) for path in paths}


@cache
def classes() -> dict[str, tuple[str, ast.ClassDef]]:
    """Name of a class -> its module and source."""
    return {
        node.name: (m, node) for m, tree in modules().items() for node in tree.body if isinstance(node, ast.ClassDef)
    }


def words(annotation: ast.expr | None) -> set[str]:
    """Every name in an annotation."""
    return set() if annotation is None else set(re.findall(r"\w+", ast.unparse(annotation)))


def parameters(function: ast.FunctionDef) -> Types:
    """Name of each parameter -> the names in its annotation."""
    given = function.args
    return {each.arg: words(each.annotation) for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def functions(of: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Methods and properties of a class."""
    return (node for node in of.body if isinstance(node, ast.FunctionDef))


def assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of each name; `a, b = c` has the value for both."""
    target, value = node.targets[0], node.value
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    return zip(targets, value.elts if isinstance(value, ast.Tuple) else [value] * len(targets), strict=False)


@cache
def attributes(name: str) -> Types:
    """Attributes, fields and properties of a class, those of its bases too -> the names in their types."""
    _, source = classes()[name]
    found = {k: v for base in map(ast.unparse, source.bases) if base in classes() for k, v in attributes(base).items()}
    for node in source.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = words(node.annotation)
    for function in functions(source):
        if any("property" in ast.unparse(mark) for mark in function.decorator_list):
            found[function.name] = words(function.returns)
        for node in ast.walk(function) if function.name == "__init__" else ():
            for target, value in assigned(node) if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Attribute) and isinstance(value, ast.Name):
                    found[target.attr] = parameters(function).get(value.id, set())
    return found


@cache
def holding() -> set[str]:
    """The config and every class that has it, or another such class, as an attribute."""
    found, before = set(CONFIG), 0
    while len(found) != before:
        before = len(found)
        found |= {name for name in classes() if any(types & found for types in attributes(name).values())}
    return found


@cache
def named(module: str, name: str) -> tuple[str, ast.FunctionDef | ast.ClassDef] | None:
    """The function or class that a module has by this name, and where it is defined."""
    if module not in modules():
        return None
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node in modules()[module].body:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return named(node.module, alias.name) or named(f"{node.module}.__init__", alias.name)
    return None


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """It and what stands in it, as it is evaluated: arguments before their call."""
    for child in ast.iter_child_nodes(node):
        yield from in_order(child)
    yield node


class Walk:
    """The modules that get the config, in the order of the calls; each function once."""

    def __init__(self) -> None:
        self.seen, self.visited = set[tuple[str, str | None, str]](), list[str]()

    def enter(self, module: str, of: str | None, function: ast.FunctionDef) -> None:
        """A function, if it is new, and all that it calls."""
        if (key := (module, of, function.name)) in self.seen:
            return
        self.seen.add(key)
        self.visited.append(module)
        types = parameters(function) | ({"self": {of}} if of else {})
        for node in (each for statement in function.body for each in in_order(statement)):
            if isinstance(node, ast.Assign):
                types |= {t.id: typed(v, types, module) for t, v in assigned(node) if isinstance(t, ast.Name)}
            if isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
                types[node.optional_vars.id] = typed(node.context_expr, types, module)
            if isinstance(node, ast.Call) and (target := called(node.func, types, module)):
                self.enter(*target)


def typed(value: ast.expr, types: Types, module: str) -> set[str]:
    """The names in an expression's type; none where it is not known."""
    if isinstance(value, ast.Name):
        return types.get(value.id, set())
    if isinstance(value, ast.Attribute):
        owners = typed(value.value, types, module) & classes().keys()
        return {name for owner in owners for name in attributes(owner).get(value.attr, set())}
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and (there := named(module, value.func.id)):
        return {there[1].name} if isinstance(there[1], ast.ClassDef) else words(there[1].returns)
    return set()


def called(what: ast.expr, types: Types, module: str) -> tuple[str, str | None, ast.FunctionDef] | None:
    """Module, class and source of a function that is called and gets the config, itself or within another object."""
    if isinstance(what, ast.Name) and (there := named(module, what.id)):
        place, found = there
        if isinstance(found, ast.FunctionDef):
            return (place, None, found) if gets_config(found) else None
        made = next((each for each in functions(found) if each.name == "__init__" and gets_config(each)), None)
        return (place, found.name, made) if made else None
    if isinstance(what, ast.Attribute):
        for owner in sorted(typed(what.value, types, module) & classes().keys()):
            for name in (owner, *(base for base in map(ast.unparse, classes()[owner][1].bases) if base in classes())):
                for each in functions(classes()[name][1]):
                    if each.name == what.attr and (name in holding() or gets_config(each)):
                        return classes()[name][0], name, each
    return None


def gets_config(function: ast.FunctionDef) -> bool:
    """Has it a parameter that is the config or holds it?"""
    return any(types & holding() for types in parameters(function).values())


def count_moves() -> tuple[int, int]:
    """Moves from one floor to another, and how many of them go upwards."""
    start, walk = named(*START), Walk()
    assert start is not None
    assert isinstance(start[1], ast.FunctionDef)
    walk.enter(start[0], None, start[1])
    levels = [FLOORS.index(module.split(".")[0]) for module in walk.visited]
    steps = [after - before for before, after in pairwise(levels) if after != before]
    return len(steps), sum(step < 0 for step in steps)


if __name__ == "__main__":
    print("{} moves between floors, {} of them upwards".format(*count_moves()))
