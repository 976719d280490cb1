# SPDX-License-Identifier: Apache-2.0
"""Every command line of a benchmark in the docs, the plans and the modules' own text is one that its module takes."""

import ast
import re
import shlex
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.lanes import read_plan
from benchmarks.local_services import ROOT
from benchmarks.real_recipes import Recipe, recipe_of, refuse_what_does_not_go_together
from benchmarks.scaling import cells, prompts_of_a_gpu
from benchmarks.two_machines import changes
from tasks.config.recipes import changed_recipe, parse_changes

CALL = re.compile(r"python -m benchmarks\.(\w+)(.*)", re.DOTALL)
MAY_BE_LEFT_OUT = re.compile(r"[\[\]](?!\w)|(?<!\w)\[|\.\.\.")
STANDS_FOR = {"RECIPE": "sd35-ocr-flow-grpo", "SECONDS": "1", "N": "1"}
STANDS_FOR |= dict.fromkeys(["F=V", "FIELD=VALUE", "NAME=VALUE"], "trainer.seed=1")


def in_page(text: str) -> Iterator[str]:
    """Code in a sentence, which may go over a line's end, and the lines of code blocks."""
    block = re.compile(r"^```.*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for lines in block.findall(text):
        yield from lines.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`]+)`", block.sub("", text))


def in_module(text: str) -> Iterator[str]:
    """The indented lines of a module's own text, each with those that go on with it, and code in its sentences."""
    said = ast.get_docstring(ast.parse(text)) or ""
    yield from re.findall(r"^ {4}(python.*(?:\n {8}.*)*)", said, re.MULTILINE)
    yield from in_page(said)


def texts() -> Iterator[tuple[str, str]]:
    """File -> code that stands there."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")):
        yield from ((path.name, text) for text in in_page(path.read_text()))
    for path in (ROOT / "benchmarks").rglob("*.py"):
        yield from ((path.name, text) for text in in_module(path.read_text()))
    for path in ROOT.glob("benchmarks/plans/*.yaml"):
        yield from ((path.name, line.strip("# ")) for line in path.read_text().splitlines() if line.startswith("#"))
        yield from ((path.name, part) for lane in read_plan(path) for part in lane.run.split("&&"))


def commands() -> Iterator[Any]:
    """(module, arguments) of each, with what may be left out, and with something in the place of what stands for it."""
    found = ((where, CALL.match(" ".join(text.split()))) for where, text in texts())
    split = (
        (where, call[1], shlex.split(MAY_BE_LEFT_OUT.sub(" ", call[2]), comments=True)) for where, call in found if call
    )
    for where, module, words in sorted({(where, module, (*words,)) for where, module, words in split}):
        given = [STANDS_FOR.get(word, word) for word in words]
        yield pytest.param(module, given, id=f"{where}: {module} {' '.join(given)[:60]}")


class Parsed(BaseException):
    """Takes what was parsed out of a program that would now begin."""


def parsed(module: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a module's own parser makes of its arguments; a wrong one is a `SystemExit` or a `click.UsageError`."""
    main = import_module(f"benchmarks.{module}.__main__" if module == "bad_inputs" else f"benchmarks.{module}").main
    if main.__annotations__.keys() - {"return"}:
        app = typer.Typer()
        app.command()(main)
        return typer.main.get_command(app).make_context(module, given).params
    parse = ArgumentParser.parse_args

    def stop(parser: ArgumentParser, *args: Any) -> Namespace:
        raise Parsed(parse(parser, *args))

    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *given])
    with pytest.raises(Parsed) as found:
        main()
    return vars(found.value.args[0])


def accept(module: str, chosen: dict[str, Any]) -> None:
    """Make the configs of a command's runs; a `ConfigError` where one is refused."""
    if module == "scaling":
        config = changed_recipe(chosen["recipe"], chosen["set"])
        prompts = chosen["prompts"] or prompts_of_a_gpu(config)
        for cell in cells(chosen["kinds"], chosen["gpus"], prompts, chosen["divided"] or [max(chosen["gpus"]) // 2]):
            run = cell.changes(config, chosen["iterations"], chosen["device"])
            config.with_changes(parse_changes(run, recipe=config))
    if module == "two_machines":
        changed_recipe(chosen["recipe"], changes(chosen["device"], chosen["gpus_per_machine"], chosen["set"]))
    if module == "real_recipes":
        asked = (chosen["groups"], chosen["set"], chosen["machine"], chosen["rehearse"])
        refuse_what_does_not_go_together(Recipe(name, recipe_of(name), *asked) for name in chosen["recipes"])


@pytest.mark.parametrize(("module", "given"), commands())
def test_a_benchmarks_command_is_one_that_it_takes(
    module: str, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without arguments may be a module's name alone, which has to be there."""
    if given:
        accept(module, parsed(module, given, monkeypatch))
    else:
        assert find_spec(f"benchmarks.{module}")


@pytest.mark.parametrize(
    "command",
    [
        "words --write",
        "words_algorithms --write",
        "time_to_reward --write",
        "fewer_images --write",
        "outages --cases",
        "endings --moments",
        "kill_rounds --rounds 0",
        "long_run --iterations 0",
        "lab_servers",
        "real_recipes",
    ],
)
def test_no_table_is_made_of_a_log_that_is_not_there(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # the pages are those of the present folder
    module, *given = command.split()
    log = tmp_path / "log.jsonl"
    monkeypatch.setattr(sys, "argv", [module, *given, "--log", str(log)])
    with pytest.raises(SystemExit, match="2"):
        import_module(f"benchmarks.{module}").main()
    assert f"there is no log {log}" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["scaling", "real_recipes"])
def test_a_recipe_that_is_not_there_ends_a_benchmark_in_a_sentence_and_leaves_no_folder(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [module, "no-recipe"])
    with pytest.raises(SystemExit) as found:
        import_module(f"benchmarks.{module}").main()
    assert "has no train deployment 'no-recipe'" in f"{found.value.code}{capsys.readouterr().err}"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rewards --only ocr --write", "--write puts the whole table into the docs: leave out --only"),
        ("rewards --only no_reward", "invalid choice: 'no_reward'"),
        (
            "rewards --only shapes clip_score --device cuda",
            "--only shapes: not with --device cuda, which is for rewards with a model",
        ),
        ("rollout --model no-model", "invalid choice: 'no-model'"),
        ("rollout --only 'diffusers, compiled'", "--only diffusers, compiled: not with --device cpu"),
        ("scaling words --iterations 3", "--iterations 3: the first 2 and the last are left out, so it takes more"),
        ("orchestration --iterations 3", "--iterations 3: the first 3 are left out, so it takes more"),
        ("iteration --batches 3 --optimizer-steps 2", "--optimizer-steps 2 of --batches 3: each step takes as many"),
        ("iteration --batches 0", "--optimizer-steps 1 of --batches 0"),
    ],
)
def test_what_would_measure_nothing_or_lose_rows_is_refused(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *given = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [module, *given])
    with pytest.raises(SystemExit, match="2"):
        import_module(f"benchmarks.{module}").main()
    assert said in capsys.readouterr().err
