# SPDX-License-Identifier: Apache-2.0
"""What all tests share: no telemetry, no downloads, one torch thread, and one tiny Qwen-Image folder."""

import os

os.environ |= {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_OFFLINE": "1",
    # Prefect's own 20 s fail on a busy machine. Another number than the commands' 300: a test can tell them apart.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600",
}

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

STARTS_RAY = {"ray", "ray_cluster"}
ACTORS = "tests.support.weight_actors"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `ray` on the tests of a module that has Ray, a cluster, or actors for tests among its names."""
    for module in {getattr(item, "module", None) for item in items}:
        found = vars(module).items() if module else ()
        if any(name in STARTS_RAY or getattr(value, "__module__", None) == ACTORS for name, value in found):
            for item in items:
                if getattr(item, "module", None) is module:
                    item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete QwenImagePipeline folder with random weights; nothing in it is zero. Read only."""
    from tests.support.helpers import save_tiny_model  # here, so that tests of plain functions start without diffusers

    return save_tiny_model(tmp_path_factory.mktemp("tiny_model") / "base")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """torch.distributed with this process as its only rank."""
    from tests.support.helpers import single_rank

    with single_rank():
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a family -> its tiny checkpoint, made once. Read only."""
    from tests.support.tiny_models import FAMILIES

    @functools.cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name) / "model"
        FAMILIES[name].save(path)
        return path

    return folder
