# SPDX-License-Identifier: Apache-2.0
"""The page of a first real run: what its download takes of the published files, by the hub's own command line."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub.cli import download, hf
from huggingface_hub.utils import filter_repo_objects

from tests.support.published_layout import LAYOUTS

PAGE = Path(__file__).parents[2] / "docs" / "first-real-run.md"


def test_the_download_takes_the_components_and_nothing_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub is asked for it, where a pattern that is no option's would be the one file to take."""
    asked: list[dict[str, Any]] = []
    for name in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(download, name, lambda **given: asked.append(given) or "there")
    (line,) = re.findall(r"^hf (download .+)$", PAGE.read_text(), re.MULTILINE)
    done = CliRunner().invoke(hf.app, shlex.split(line))
    assert done.exit_code == 0, done.output
    (request,) = asked
    assert request["repo_id"] == "stabilityai/stable-diffusion-3.5-medium"
    LAYOUTS["sd3.5-medium"].save(tmp_path)
    components = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    LAYOUTS["sd3.5-medium"].publish(tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    taken = {*filter_repo_objects(files, ignore_patterns=request["ignore_patterns"])}
    wanted = {name for name in files if name.partition("/")[0] in components and "fp16" not in name}
    assert "text_encoder_3/model-00002-of-00002.safetensors" in wanted
    assert wanted | {"model_index.json"} <= taken
    assert {name for name in taken - wanted if name.endswith(".safetensors") or "fp16" in name} == set()
