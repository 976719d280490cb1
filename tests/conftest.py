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
    # Prefect's own 20 s fail on a busy machine; another number than the commands' 300 can be told from it.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600",
}

import functools
import gc
import importlib.metadata
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
gc.disable()  # while the tests are imported: see pytest_collection_finish
# diffusers and transformers ask it when they are imported: to read what every package has installed takes .3 s.
importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)

STARTS_RAY = {"ray", "ray_cluster"}
STARTS_FLOWS, STARTS_STAGES = "prefect_server", "forked_python"
SIDE_BY_SIDE = "tests.support.side_by_side"
FORKED = "tests.support.forked"
ACTORS = "tests.support.weight_actors"


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run side by side, ranks are forks of this process, before it imports any test.

    And with `-p tests.support.forked` programs, too, for as many tests as import all of what these need, or use it.
    """
    if config.pluginmanager.hasplugin(SIDE_BY_SIDE) or config.pluginmanager.hasplugin(FORKED):
        from tests.support.forked import OF_COMMANDS, OF_STAGES, serve_from_here

        serve_from_here([*OF_COMMANDS, *OF_STAGES] if config.pluginmanager.hasplugin(FORKED) else ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `ray` on the tests of a module that has Ray, a cluster, or actors for tests among its names."""
    for module in {getattr(item, "module", None) for item in items}:
        found = vars(module).items() if module else ()
        if any(name in STARTS_RAY or getattr(value, "__module__", None) == ACTORS for name, value in found):
            for item in items:
                if getattr(item, "module", None) is module:
                    item.add_marker(pytest.mark.ray)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the tests have imported stays for good: to look through it for garbage would take a tenth of their time.

    And where some of them start flows, what forks has imported for these, too. Where tests run side by side, the empty
    database of MLflow is made here: each process would make its own, with 360 modules that are imported for it.
    """
    if session.config.pluginmanager.hasplugin(SIDE_BY_SIDE) and any(map(_asks_mlflow, session.items)):
        from tests.support.mlflow_store import empty_database  # here, so that other tests start without MLflow

        empty_database()
    gc.freeze()
    gc.enable()
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if wanted & {STARTS_FLOWS, STARTS_STAGES}:
        from tests.support.forked import OF_COMMANDS, OF_STAGES, preload  # here, so that other tests start without

        preload(OF_COMMANDS if STARTS_FLOWS in wanted else [], OF_STAGES if STARTS_STAGES in wanted else [])


def _asks_mlflow(item: pytest.Item) -> bool:
    return "mlflow_in" in vars(getattr(item, "module", item))


@pytest.fixture(scope="session")
def worker_forks() -> Iterator[str]:
    """Where Ray's workers are forks of one process for all tests, if `tasks.actors.worker_forks.VARIABLE` says so."""
    from tasks.actors.cluster import QUIET_ENVIRONMENT  # here, so that tests of plain functions start without Ray
    from tasks.actors.worker_forks import worker_forks

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forks-"))  # a socket's path is short
        with pytest.MonkeyPatch.context() as patch:
            for name, value in QUIET_ENVIRONMENT.items():  # as a worker has it
                patch.setenv(name, value)
            place = stack.enter_context(worker_forks(Path(folder)))
        yield str(place)


@pytest.fixture(scope="session")
def forked_python() -> Iterator[Path]:
    """A `python` whose processes begin with their imports done; its folder has nothing else."""
    from tests.support.forked_python import forked_python

    with forked_python() as command:
        yield command


@pytest.fixture(scope="module")
def forked_workers(worker_forks: str) -> Iterator[dict[str, Any]]:
    """Ray's runtime environment by which workers come from there on clusters that `ray_cluster` has not started."""
    from tasks.actors.cluster import QUIET_ENVIRONMENT
    from tasks.actors.worker_forks import forked_environment, set_up_at_once

    with pytest.MonkeyPatch.context() as patch, set_up_at_once():
        for name, value in QUIET_ENVIRONMENT.items():  # a fork of a process that had others would be refused
            patch.setenv(name, value)
        yield forked_environment(Path(worker_forks))


@pytest.fixture(scope="module")
def shared_forks(worker_forks: str) -> Iterator[None]:
    """The clusters of a module's tests have their workers from there."""
    from tasks.actors.worker_forks import VARIABLE

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, worker_forks)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete QwenImagePipeline folder with random weights; nothing in it is zero. Read only."""
    from tests.support.helpers import save_tiny_model  # here, so that tests of plain functions start without diffusers

    return save_tiny_model(tmp_path_factory.mktemp("tiny_model") / "base")


@pytest.fixture(scope="session")
def one_block_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` with one transformer block of its two: for what is the same in each block, at two thirds the time.

    That the blocks are cut, gathered and trained one after the other is tested with two: test_engine, test_fsdp_ranks.
    """
    from tests.support.helpers import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("one_block_model") / "base", layers=1)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """torch.distributed with this process as its only rank."""
    from tests.support.helpers import single_rank

    with single_rank():
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; it needs the right to mount one, which a container's root has."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # MLflow keeps its database open


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
