# SPDX-License-Identifier: Apache-2.0
"""What the docs' site has beside the pages of this folder: the README and its like, and the API, a page a room.

A hook of MkDocs (mkdocs.yml). Pages that stand elsewhere in the project are copied in, with their links; a link to a
file that is no page of the site leads to its line in the map of the files.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
FLOORS = ("flows", "tasks", "models")
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
}
"""Pages outside of docs/, by path, and their names on the site."""
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Add the API's pages to the navigation."""
    config.nav.append({"API": [{name: _page_of(name)} for name in rooms()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=moved(source, (ROOT / source).read_text())))
    for name, modules in rooms().items():
        files.append(File.generated(config, _page_of(name), content=api_page(name, modules)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the pages in docs/ that lead out of it."""
    source = f"docs/{page.file.src_uri}"
    return moved(source, markdown) if (ROOT / source).is_file() else markdown


def rooms() -> dict[str, list[str]]:
    """Each package of the floors and its modules that say something, in order."""
    found: dict[str, list[str]] = {}
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py"), key=lambda path: (str(path.parent), path.name)):
            in_package = path.name != "__init__.py" and (path.parent / "__init__.py").is_file()
            if in_package and ast.get_docstring(ast.parse(path.read_text())):
                module = path.relative_to(ROOT).with_suffix("")
                found.setdefault(".".join(module.parts[:-1]), []).append(".".join(module.parts))
    return found


def api_page(name: str, modules: list[str]) -> str:
    """A room's page: what its package says of itself, then every module."""
    said = ast.get_docstring(ast.parse((ROOT / name.replace(".", "/") / "__init__.py").read_text()))
    return "\n\n".join([f"# {name}", said or "", *(f"::: {module}" for module in modules)])


def moved(source: str, text: str) -> str:
    """A page's text with its relative links as they must be on the site.

    Args:
        source: where the page stands in the project.
        text: its markdown.
    """
    page = PAGES.get(source) or posixpath.relpath(source, "docs")

    def link(found: re.Match[str]) -> str:
        target, mark, anchor = found[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in PAGES:
            there = PAGES[path]
        elif path.startswith("docs/"):
            there = posixpath.relpath(path, "docs")
        elif Path(path).parts[0] in (*FLOORS, "benchmarks", "tests"):
            there, mark, anchor = "files.md", "", ""
        else:
            return f"{found[1].strip('![]')} (`{path}`)"
        return f"{found[1]}({posixpath.relpath(there, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return LINK.sub(link, text)


def _page_of(room: str) -> str:
    return f"api/{room}.md"
