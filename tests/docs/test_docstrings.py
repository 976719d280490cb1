# SPDX-License-Identifier: Apache-2.0
"""Docstrings of public functions: they begin with what is returned, and say the shapes of tensors."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALL_FLOORS = ("flows", "tasks", "models")
FLOORS = ("models", "tasks")
NUMBER = r"-?\d+(?:\.\d+)?"
SHAPE = re.compile(rf"\[(?!{NUMBER}, {NUMBER}\])[^\[\]]+\]|\bscalars?\b|\bshapes?\b")
"""[B, ...] or any other list of sizes, a scalar, or in words whose shape it is: weights by name have one each. Two
numbers in brackets say between which values."""


@dataclass(frozen=True)
class Function:
    """One function or method as it stands in the source.

    Attributes:
        place: path and line.
        name: with its class.
        bases: names of the classes that its class derives from; empty for a function.
        docstring: or ""; of an `__init__` also its class's, where the arguments may stand.
    """

    place: str
    name: str
    bases: tuple[str, ...]
    docstring: str

    @property
    def says_shapes(self) -> bool:
        return SHAPE.search(self.docstring) is not None


def functions() -> Iterator[Function]:
    """The public functions of FLOORS, and methods of public classes, with a tensor or an array in their signature."""
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            yield from in_module(path.read_text(), str(path.relative_to(ROOT)))


def bases_of(node: ast.ClassDef) -> tuple[str, ...]:
    return tuple(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)


def classes(*sources: str) -> dict[str, tuple[str, ...]]:
    """Name -> bases of the classes at the top of these modules."""
    nodes = (node for source in sources for node in ast.parse(source).body)
    return {node.name: bases_of(node) for node in nodes if isinstance(node, ast.ClassDef)}


def in_module(source: str, path: str) -> Iterator[Function]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and wanted(node):
            yield Function(f"{path}:{node.lineno}", node.name, (), ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = bases_of(node)
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and wanted(method):
                    name, said = f"{node.name}.{method.name}", ast.get_docstring(method) or ""
                    if method.name == "__init__":
                        said += ast.get_docstring(node) or ""
                    yield Function(f"{path}:{method.lineno}", name, bases, said)


def wanted(node: ast.FunctionDef) -> bool:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    annotations = [*(argument.annotation for argument in arguments), node.returns]
    tensors = any(note is not None and re.search(r"\b(Tensor|ndarray)\b", ast.unparse(note)) for note in annotations)
    return tensors and (node.name == "__init__" or not node.name.startswith("_"))


def without_shapes(found: list[Function], parents: dict[str, tuple[str, ...]]) -> list[str]:
    """Those that say no shape, and override no method of a class above theirs that does."""
    said = {function.name for function in found if function.says_shapes}

    def above(bases: tuple[str, ...]) -> Iterator[str]:
        for base in bases:
            yield base
            yield from above(parents.get(base, ()))

    return [
        f"{function.place} {function.name}"
        for function in found
        if not function.says_shapes
        and not {f"{base}.{function.name.split('.')[-1]}" for base in above(function.bases)} & said
    ]


def test_every_function_of_tensors_says_their_shapes() -> None:
    found = list(functions())
    assert len(found) > 150, "the functions are no longer found, so this test would prove nothing"
    sources = (path.read_text() for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
    missing = without_shapes(found, classes(*sources))
    assert not missing, "no shape in the docstring, such as [B, ...]:\n" + "\n".join(missing)


def test_they_begin_with_what_is_returned() -> None:
    """ "Of the whole run" leaves the reader to look for the name."""
    left_out = []
    for path in sorted(path for floor in ALL_FLOORS for path in (ROOT / floor).rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        named = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        public = {node: ast.get_docstring(node) or "" for node in named if not node.name.startswith("_")}
        left_out += [
            f"{path.relative_to(ROOT)}:{node.lineno}" for node, said in public.items() if said.startswith("Of ")
        ]
    assert not left_out, "of what? Begin with what is returned:\n" + "\n".join(left_out)


SOURCE = '''
class Base:
    def said(self, x: Tensor) -> None:
        """Of x [B, ...]."""
    def silent(self, x: "torch.Tensor | None") -> None:
        """Of x."""

class Derived(Base):
    def said(self, x: Tensor) -> None: ...
    def own(self) -> dict[str, Tensor]: ...
    def _hidden(self, x: Tensor) -> None: ...

class Further(Derived):
    def said(self, x: np.ndarray) -> None: ...

class Made:
    """Of x [B]."""
    def __init__(self, x: Tensor): ...

class MadeInSilence:
    def __init__(self, x: Tensor): ...

class _Hidden:
    def own(self, x: Tensor) -> None: ...

def number(x: float) -> float: ...
def alone(x: Tensor) -> None:
    """Numbers in [0, 1)."""
def ranged(x: Tensor) -> None:
    """Numbers in [-1, 1]."""
def whole(x: Tensor) -> None:
    """Numbers in [-1, 1], [B, 3]."""
'''


def test_what_counts_as_saying_them() -> None:
    found = list(in_module(SOURCE, "here.py"))
    methods = ["Base.said", "Base.silent", "Derived.said", "Derived.own", "Further.said"]
    methods += ["Made.__init__", "MadeInSilence.__init__"]
    assert [function.name for function in found] == [*methods, "alone", "ranged", "whole"]
    silent = ["Base.silent", "Derived.own", "MadeInSilence.__init__", "alone", "ranged"]
    assert [line.split()[1] for line in without_shapes(found, classes(SOURCE))] == silent
