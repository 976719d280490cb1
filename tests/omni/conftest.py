# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder need vLLM-Omni; `make test` runs them in the environment that has it (.venv-vllm)."""

import importlib.util
import logging
from pathlib import Path

import pytest

import models  # noqa: F401  first of all: declares what torchvision lacks beside a CPU torch

WITHOUT = [name for name in ("vllm", "vllm_omni") if importlib.util.find_spec(name) is None]

logging.getLogger("vllm").setLevel(logging.WARNING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder's tests, and say why, where vLLM-Omni is not installed."""
    for item in items:
        if WITHOUT and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"{WITHOUT[0]} is not installed here; .venv-vllm runs these tests"))
