# SPDX-License-Identifier: Apache-2.0
"""The map of the files, docs/files.md: `python docs/file_map.py` writes it from what each file says of itself."""

import ast
import inspect
import re
import subprocess
import tempfile
import tokenize
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "files.md"
FIRST = ("flows", "tasks", "models", "benchmarks", "tests", "docs", "data", "locks", "machines")
TEXT = """# The files

Every file in one sentence: the first one of its docstring or of the comment that it begins with, the title of a page,
or what `docs/file_map.py` says of one that can have neither. `python docs/file_map.py` writes this page, and
`tests/docs/test_files.py` holds it true.
"""
SENTENCE = re.compile(r"^(.+?(?<!e\.g)(?<!i\.e)[.?!])(?=\s|$)")
COMMENTS = {
    ".md": r"# (?P<text>.*)",
    ".j2": r"\{#-?\s*(?P<text>.*?)\s*-?#\}",
}
"""How a page or a template begins, by its suffix: with a title, or with a comment."""
HASHES = r"(?:#!.*\n)?(?P<text>(?:#.*\n)+)"
"""How all others that can have a comment begin, some after a shebang."""
SAID = {
    ".github/ISSUE_TEMPLATE/defect.md": "The form for what is not as the docs or a docstring say.",
    ".github/ISSUE_TEMPLATE/proposal.md": "The form for a method, a reward, a model family or another contract.",
    ".github/pull_request_template.md": "What whoever proposes a change is asked.",
    ".devcontainer/devcontainer.json": "The dev container of editors: the Dockerfile's base with both environments.",
    "CHANGELOG.md": "What a user meets of each change, by version.",
    "CONTRIBUTING.md": "How to set up, where what belongs, and the rules of the code, the tests and the commits.",
    "LICENSE": "The Apache License 2.0.",
    "NOTICE": "Whose work comes with what is installed or read, under which licences.",
    "README.md": "What this is, two commands that show it, and where to read on.",
    "SECURITY.md": "How to report a weakness.",
    "benchmarks/rehearsal.json": "What docs/first-real-run.md changes of a recipe to rehearse it with small pictures.",
    "data/base_model_metrics.json": "How good the tiny base model is: the metrics of the stage `base_model`.",
    "data/raw/numbers.txt": "The prompts of the tiny model, one a line.",
    "docs/architecture.svg": "The picture of architecture.md: floors, processes and stores.",
    "docs/compare_page.png": "The page of two runs.",
    "docs/fewer_images_awm.png": "Held-out reward of AWM, by setting for fewer pictures.",
    "docs/fewer_images_diffusion_nft.png": "Held-out reward of DiffusionNFT, by setting for fewer pictures.",
    "docs/fewer_images_flow_grpo.png": "Held-out reward of Flow-GRPO, by setting for fewer pictures.",
    "docs/learning.png": "The curves of learning.md: held-out reward of each algorithm.",
    "docs/mlflow_picture_slider.png": "A run's validation pictures on MLflow's page.",
    "docs/mlflow_run.png": "A run on MLflow's page.",
    "docs/mlflow_runs.png": "The list of runs on MLflow's page.",
    "docs/prefect_form.png": "The form that Prefect's page shows for a recipe.",
    "docs/prefect_progress.png": "A run's progress on Prefect's page.",
    "docs/prefect_run_page.png": "The page of a flow run in Prefect.",
    "docs/quickstart_before_after.png": "What the quickstart's model draws before and after.",
    "docs/quickstart_curve.png": "Held-out reward of the quickstart, three seeds.",
    "docs/report.png": "A run's own page.",
    "docs/report_samples.png": "The pictures on a run's own page.",
    "docs/words.png": "Held-out reward of the words model.",
    "docs/words_algorithms.png": "Held-out reward of the words model, by algorithm.",
    "docs/words_before_after.png": "What the words model draws before and after.",
    "docs/words_fewer_images.png": "Held-out reward of the words model with what is said to need fewer pictures.",
    "dvc.lock": "What DVC's stages were made from, and the hashes of what they made.",
    "machines/eight_h200.json": "What a recipe of real size changes where rollout and update share its eight H200s.",
    "machines/four_h200.json": "What a recipe of real size changes on a machine with four H200.",
    "machines/one_h200.json": "What a recipe of real size changes on a machine with one H200.",
    "machines/two_h200.json": "What a recipe of real size changes on a machine with two H200.",
    "tests/kept_run/run.tar.xz": "The folder of a user whose training run was killed.",
    "tests/kept_run/undisturbed.json": "Metrics of the same run that nothing disturbed.",
}
"""Path -> what is in a file that has no place for a comment, is data or another program's, or whose title is a name."""
RECORDS = {
    "benchmarks/guard_runs": "What guards read of a run of `benchmarks/guards.py`: `{stem}`.",
    "benchmarks/measured": "What runs logged, from which pages have their tables: `{stem}`.",
}
"""Folder -> what is in each of its files that cannot say it."""


def tracked(root: Path) -> list[str]:
    """Paths of the files that git tracks, in order.

    In an archive of the source, which has no .git, all that .gitignore does not leave out.
    """
    if (root / ".git").exists():
        return _git_lists(root)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "init", "--quiet", "--bare", folder], check=True)
        there = (f"--git-dir={folder}", "-c", "core.bare=false", f"--work-tree={root}")
        return _git_lists(root, *there, of=("--others", "--exclude-standard"))


def _git_lists(root: Path, *options: str, of: tuple[str, ...] = ()) -> list[str]:
    command = ["git", *options, "ls-files", "-z", *of]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return sorted(path for path in listed.stdout.split("\0") if path)


def first_sentence(path: str, source: str) -> str:
    """What a file says of itself.

    Raises:
        ValueError: it says nothing, or no sentence.
    """
    suffix = Path(path).suffix
    if suffix == ".py":
        said = _docstring(source)
    else:
        found = re.match(COMMENTS.get(suffix, HASHES), source, re.DOTALL if suffix == ".j2" else 0)
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
        folders.setdefault(str(file.parent), {})[file.name] = sentence(root, path)
    return "\n".join([TEXT, *(_section(folder, files) for folder, files in folders.items())])


def sentence(root: Path, path: str) -> str:
    """What is in a file, in a sentence: what is said of it here, or what it says of itself."""
    file, records = Path(path), RECORDS.get(str(Path(path).parent))
    if path in SAID:
        return SAID[path]
    return records.format(stem=file.stem) if records else first_sentence(path, (root / path).read_text())


def _place(path: str) -> tuple[int, str, str]:
    """FIRST in their order, then the files of the root; a folder's files before those of the folders in it."""
    file = Path(path)
    top = file.parts[0] if len(file.parts) > 1 else ""
    return FIRST.index(top) if top in FIRST else len(FIRST) + (top != ""), str(file.parent), file.name


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
