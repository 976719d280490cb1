# SPDX-License-Identifier: Apache-2.0
"""A recipe out of another system's script, overrides or configuration function: `python -m flows.migrate SCRIPT`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
import yaml

from tasks.cli.terminal import Debug, in_a_sentence, run_command
from tasks.config.errors import ConfigError
from tasks.config.migration.flow_grpo import FLOW_GRPO
from tasks.config.migration.python_config import read_config
from tasks.config.migration.script import read_overrides
from tasks.config.migration.starting_command import named_by
from tasks.config.migration.translate import KINDS, Translation, translate


def migrate(
    scripts: Annotated[
        list[Path], typer.Argument(help="Shell scripts that start a run, lists of overrides, or FILE.py:FUNCTION.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where the recipe of the one script is written.")] = None,
    debug: Debug = False,
) -> None:
    """Translate runs of VeRL-Omni, flow_grpo or DiffusionNFT: a line a setting, and a recipe for `flows.train`."""
    with in_a_sentence(debug):
        if out is not None and len(scripts) > 1:
            raise ConfigError(f"--out is {out}, but {len(scripts)} scripts are given: give one, or leave --out away")
        if len(set(scripts)) == 1:
            _show(scripts[0], _translated(scripts[0]), out)
        else:
            _count(scripts)


def _translated(script: Path) -> Translation:
    """Of a shell script, a list of overrides, or a configuration in Python: FILE.py, or FILE.py:FUNCTION."""
    file, _, function = str(script).rpartition(":") if ".py:" in script.name else (str(script), "", "")
    if file.endswith(".py"):
        return translate(read_config(Path(file), function or None), FLOW_GRPO)
    text = _text(script)
    start = named_by(text, str(script))
    if start is None:
        return translate(read_overrides(text, str(script)))
    name = start.file
    found = next((folder / name for folder in (*script.parents, Path()) if (folder / name).is_file()), None)
    if found is None:
        raise ConfigError(
            f"{script} starts with the configuration {name}, which is neither here nor above the script: give it as "
            f"FOLDER/{name}:{start.function or 'FUNCTION'} (docs/coming-from.md#flow_grpo-and-diffusionnft)"
        )
    return translate(read_config(found, start.function, start), FLOW_GRPO)


def _text(script: Path) -> str:
    try:
        return script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{script} cannot be read ({reason}): give a shell script or a list of overrides") from error


def _show(script: Path, made: Translation, out: Path | None) -> None:
    for line in sorted(made.lines, key=lambda line: line.kind):
        typer.echo(line)
    counts = ", ".join(f"{made.count(kind)} {kind}" for kind in KINDS if kind != "problem" or made.count(kind))
    typer.echo(f"\n{len(made.lines)} overrides: {counts}")
    if out is not None:
        state = f"# Not valid yet: {' '.join(made.problem.split())}\n" if made.problem else ""
        recipe = f"# From {script.name}, by flows.migrate.\n{state}{yaml.safe_dump(made.config, sort_keys=False)}"
        try:
            out.write_text(recipe)
        except OSError as error:
            raise ConfigError(
                f"--out is {out}, which cannot be written ({error.strerror}): give another file"
            ) from error
        named = shlex.quote(str(out))
        typer.echo(f"{out}: python -m flows.train --config {named}, or below `config:` of a deployment in prefect.yaml")
    if made.problem:
        raise ConfigError(f"the recipe is not valid yet: {made.problem}")


def _count(scripts: list[Path]) -> None:
    """Of each script how many of its overrides became what; one that cannot be read is an error behind the others."""
    typer.echo(f"overrides {' '.join(f'{kind:>9}' for kind in KINDS)}  valid  script")
    made, unread = dict[Path, Translation](), dict[Path, ConfigError]()
    for script in dict.fromkeys(scripts):
        try:
            made[script] = _translated(script)
            typer.echo(f"{_counted(made[script])}  {script}")
        except ConfigError as error:
            unread[script] = error
            typer.echo(f"{' '.join(['        -'] * (len(KINDS) + 1))}  {'-':5}  {script}")
    lines = [line for one in made.values() for line in one.lines]
    known = sum(line.kind in ("taken", "renamed", "explained") for line in lines)
    valid = sum(one.problem is None for one in made.values())
    typer.echo(f"{known} of {len(lines)} overrides taken, renamed or explained")
    typer.echo(f"{valid} of {len(made)} recipes valid as they are")
    if unread:
        reasons = "; ".join(map(str, unread.values()))
        raise ConfigError(f"{len(unread)} of {len(made) + len(unread)} scripts are not counted: {reasons}")


def _counted(made: Translation) -> str:
    counts = " ".join(f"{made.count(kind):9}" for kind in KINDS)
    return f"{len(made.lines):9} {counts}  {'no' if made.problem else 'yes':5}"


if __name__ == "__main__":
    run_command(migrate)
