# SPDX-License-Identifier: Apache-2.0
"""What the pages point at is there: files, sections, and the project's modules and paths that they name.

The links are read as GitHub reads them; `make docs` checks them once more as the site has them.
"""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("flows", "tasks", "models", "benchmarks", "tests", "docs")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FLOORS)})/[\w./-]+\.(?:py|md|svg|png|yaml)\b")
NAME = re.compile(r"`((?:flows|tasks|models|benchmarks)(?:\.\w+)+)`")


def pages() -> list[str]:
    """Every page that git tracks."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


@cache
def anchors(page: Path) -> frozenset[str]:
    """The sections of a page, as GitHub makes an anchor of a heading; a second one of the same text gets `-1`."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*?) *$", FENCE.sub("", page.read_text()), re.MULTILINE):
        plain = LINK.sub(lambda link: link[0].split("]")[0].lstrip("!["), heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        again = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", known) is not None for known in found)
        found.append(f"{slug}-{again}" if again else slug)
    return frozenset(found)


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file, or to no section of it."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(link)
    return broken


def missing_paths(text: str) -> list[str]:
    """Paths of the project that a text names and that are not there."""
    return [path for path in PATH.findall(text) if not (ROOT / path).exists()]


def missing_names(text: str) -> list[str]:
    """Modules, and names in modules, that a text names in backquotes and that are not there."""
    return [name for name in NAME.findall(text) if not _is_there(name)]


def _is_there(dotted: str) -> bool:
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:length])
        source = module.with_suffix(".py") if module.with_suffix(".py").is_file() else module / "__init__.py"
        if source.is_file():
            rest = parts[length:]
            return not rest or re.search(rf"\b{re.escape(rest[0])}\b", _names(source)) is not None
    return False


def _names(source: Path) -> str:
    """What a module defines or imports, one name a line."""
    names = []
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names += [ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return "\n".join(names)


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    assert not broken_links(ROOT / page)


@pytest.mark.parametrize("page", pages())
def test_paths_and_modules_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not missing_paths(text)
    assert not missing_names(text)


def test_what_counts_as_broken(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `two`, three\n\n## Again\n\n## Again\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#one-two-three) [c](other.md#again-1) [d](#here) [e](https://nowhere.example)\n"
        "```\n[quoted](nothing.md)\n```\n"
        "[f](nothing.md) [g](other.md#no-heading) [h](#there) ![i](picture.png)\n"
    )
    assert broken_links(page) == ["nothing.md", "other.md#no-heading", "#there", "picture.png"]
    assert missing_paths("in `flows/train.py`, tests/nothing.py and runs/flows/x.py") == ["tests/nothing.py"]
    assert missing_names(
        "`flows.train`, `models.schedulers.register_kernel`, `tasks.nothing`, `flows.train.nothing`"
    ) == [
        "tasks.nothing",
        "flows.train.nothing",
    ]
