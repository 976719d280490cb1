# SPDX-License-Identifier: Apache-2.0
"""The page for those who come from another framework leaves no field out, and our defaults on it are the code's."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.config.migration.flow_grpo import RULES
from tasks.config.tree import TrainConfig

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
CONFIG = TrainConfig().model_dump(mode="json")


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables below a heading, without their heads."""
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n### ")[0].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def default(path: str) -> Any:
    sections = path if path.split(".")[0] in CONFIG else f"actor_rollout_ref.{path}"
    value: Any = CONFIG
    for part in sections.split("."):
        value = value[part]
    return value


def test_every_field_of_flow_grpo_and_diffusionnft_has_a_rule_and_a_row() -> None:
    named = {name for there, *_ in rows("Fields of both") for name in re.findall(r"`([\w.]+)`", there)}
    assert sorted(RULES.keys() - named) == []
    assert named - RULES.keys() == {"gpu_number", "n_gpus"}  # which a script says, read as `gpus`


@pytest.mark.parametrize("heading", ["Fields of both", "Its fields"])
def test_our_defaults_are_the_codes(heading: str) -> None:
    """Of the first field that a row names; null stands with what it means."""
    compared = 0
    for there, _, here, ours in rows(heading):
        field = re.match(r"`([\w.]+)", here)
        said = re.match(r"`(.+)`$|(null)", ours)
        if field and said:
            value = yaml.safe_load(said[1] or "null")
            wanted = default(field[1])
            assert (float(value) if isinstance(wanted, float) else value) == wanted, there
            compared += 1
    assert compared > 25


@pytest.mark.parametrize("heading", ["Modules", "Modules of both", "Its modules"])
def test_the_modules_of_each_system_have_their_places_here(heading: str) -> None:
    """Every path of ours is there."""
    paths = [path for _, here in rows(heading) for path in re.findall(r"`((?:flows|tasks|models)/[\w/.]*)`", here)]
    assert len(paths) > 4
    root = Path(__file__).parents[2]
    assert [path for path in paths if not (root / path).exists()] == []


def test_the_standard_deviations_of_advantages_are_told_apart() -> None:
    assert any("ddof" in here for _, here in rows("Numbers"))
    assert any("ddof" in here for _, here in rows("How their numbers relate"))
