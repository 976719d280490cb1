# SPDX-License-Identifier: Apache-2.0
"""The map of the files, docs/files.md: `python docs/file_map.py` writes it from what each file says of itself."""

import ast
import inspect
import re
import subprocess
import tokenize
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "files.md"
FLOORS = ("flows", "tasks", "models", "benchmarks", "tests")
TEXT = """# The files

Every file of the floors, of the benchmarks and of the tests, in one sentence: the first one of its docstring or of the
comment that it begins with. `python docs/file_map.py` writes this page, and `tests/docs/test_files.py` holds it true.
"""
SENTENCE = re.compile(r"^(.+?(?<!e\.g)(?<!i\.e)[.?!])(?=\s|$)")
COMMENTS = {
    ".md": r"# (?P<text>.*)",
    ".j2": r"\{#-?\s*(?P<text>.*?)\s*-?#\}",
    ".yaml": r"(?P<text>(?:#.*\n)+)",
}
"""How a file that is not Python begins, by its suffix: a page's title, or a comment."""


def tracked(root: Path) -> list[str]:
    """Paths of the files of FLOORS that git tracks, in order; of kept data the README alone."""
    listed = subprocess.run(["git", "ls-files", "-z", *FLOORS], cwd=root, capture_output=True, text=True, check=True)
    return sorted(path for path in listed.stdout.split("\0") if Path(path).suffix in (".py", *COMMENTS))


def first_sentence(path: str, source: str) -> str:
    """What a file says of itself.

    Raises:
        ValueError: it says nothing, or no sentence.
    """
    suffix = Path(path).suffix
    if suffix == ".py":
        said = _docstring(source)
    else:
        found = re.match(COMMENTS.get(suffix, "(?P<text>)"), source, re.DOTALL if suffix == ".j2" else 0)
        said = found and re.sub(r"(?m)^#+ ?", "", found["text"]) + ("." if suffix == ".md" else "")
    sentence = SENTENCE.match(" ".join((said or "").split("\n\n")[0].split()))
    if sentence is None:
        raise ValueError(f"{path} does not begin with a sentence that says what is in it: give it a docstring")
    return sentence[1]


def _docstring(source: str) -> str | None:
    """Of a module, without parsing the rest of it."""
    before = {tokenize.COMMENT, tokenize.NL}
    first = next(token for token in tokenize.generate_tokens(StringIO(source).readline) if token.type not in before)
    return inspect.cleandoc(ast.literal_eval(first.string)) if first.type == tokenize.STRING else None


def page(root: Path) -> str:
    """The map: a section and a table for each folder, the folder's own sentence that of its `__init__.py`."""
    folders: dict[str, dict[str, str]] = {}
    for path in sorted(tracked(root), key=_place):
        file = Path(path)
        folders.setdefault(str(file.parent), {})[file.name] = first_sentence(path, (root / path).read_text())
    return "\n".join([TEXT, *(_section(folder, files) for folder, files in folders.items())])


def _place(path: str) -> tuple[int, str, str]:
    """The floors in their order, a folder's files before those of the folders in it."""
    file = Path(path)
    return FLOORS.index(file.parts[0]), str(file.parent), file.name


def _section(folder: str, files: dict[str, str]) -> str:
    lines = [f"## {folder}/", ""]
    if "__init__.py" in files:
        lines += [files["__init__.py"], ""]
    rows = [(name, sentence.replace("|", "\\|")) for name, sentence in files.items() if name != "__init__.py"]
    if rows:
        lines += ["| File | What is in it |", "|---|---|", *(f"| `{name}` | {said} |" for name, said in rows), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(ROOT))
