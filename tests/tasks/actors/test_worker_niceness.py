# SPDX-License-Identifier: Apache-2.0
"""Workers compete for the processors as the configuration says, be they forks or not; a real Ray."""

import os
from pathlib import Path

import pytest

from tasks.actors.worker_forks import VARIABLE
from tests.support.forked import Program
from tests.support.patience import PATIENCE

LEAST = 19
"""The niceness behind which nothing is."""
CLUSTERS = """
import os
from pathlib import Path
import ray
from tasks.actors import worker_forks
from tasks.actors.cluster import ray_cluster
from tasks.config.trainer import RayConfig

worker_forks.IMPORTED = ()  # what workers begin with is not the question

class Worker:
    def niceness(self):
        return os.nice(0)

found = []
for settings in ({}, {"worker_niceness": 4}, {"forked_workers": False}):
    with ray_cluster(RayConfig(num_cpus=1, **settings)):
        worker = ray.remote(num_cpus=0)(Worker).remote()
        found.append(ray.get(worker.niceness.remote()) - os.nice(0))
Path("found").write_text(str(found))
"""


@pytest.mark.ray
def test_a_clusters_workers_have_the_niceness_that_the_configuration_says(tmp_path: Path) -> None:
    """By default the driver's own. With 15 more, as Ray has it, whatever else runs on a machine goes first."""
    without = {"RAY_worker_niceness", "RAY_ADDRESS", VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    program = Program(["-c", CLUSTERS], tmp_path, environment, tmp_path / "output")
    assert program.wait(PATIENCE) == 0, program.output()
    more = min(4, LEAST - os.nice(0))  # of tests that are at the least themselves nobody can go behind
    assert (tmp_path / "found").read_text() == f"[0, {more}, 0]"
