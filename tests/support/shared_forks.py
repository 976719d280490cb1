# SPDX-License-Identifier: Apache-2.0
"""One process for all tests whose forks are Ray's workers: what each of these would import takes 2 to 8 seconds."""

import os
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.actors.cluster import QUIET_ENVIRONMENT
from tasks.actors.worker_forks import VARIABLE, worker_forks


def begin_shared_forks(config: pytest.Config) -> None:
    """Until pytest ends, for clusters of this process and for runs that join a cluster which several have. A run that
    starts its own has its own process that forks, too."""
    if find_spec("vllm") is not None:
        return  # see forks_for
    os.environ |= {name: os.environ.get(name, value) for name, value in QUIET_ENVIRONMENT.items()}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forks-"))
        os.environ[VARIABLE] = str(stack.enter_context(worker_forks(Path(folder))))
        config.add_cleanup(stack.pop_all().close)
