# SPDX-License-Identifier: Apache-2.0
"""What the driver waits for comes from another machine: a real Ray cluster of two nodes."""

import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.authentication import authentication_token_setup as tokens
from ray.cluster_utils import Cluster

from tasks.actors import waiting
from tasks.actors.waiting import come_first, get
from tests.support.patience import PATIENCE
from tests.support.platform_helpers import FEW_DAEMONS

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
STORE = 10**9


@ray.remote(num_cpus=0.1)
def pictures(megabytes: int) -> np.ndarray:
    return np.full((megabytes, 1 << 20), 7, np.uint8)


@ray.remote(num_cpus=0.1)
def late(seconds: float) -> None:
    time.sleep(seconds)


@ray.remote(num_cpus=0.1, max_retries=0)
def failing() -> None:
    raise ZeroDivisionError


@pytest.fixture(scope="module", autouse=True)
def driver(forked_workers: dict[str, Any]) -> Iterator[None]:
    """It is on the head, which has no CPU; what tasks return is on the other machine."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        patch.setenv("RAY_TMPDIR", folder)
        tokens.enable_token_auth_by_default()
        tokens.ensure_token_if_auth_enabled()
        machine = {"object_store_memory": STORE, **FEW_DAEMONS}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **machine})
        try:
            cluster.add_node(num_cpus=1, **machine)
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env=forked_workers)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.slow
def test_what_takes_longer_than_a_piece_to_come_here_arrives() -> None:
    """Hundreds of megabytes, which take parts of a second on loopback; Ray begins anew with each piece."""
    assert int(get(pictures.remote(250), PATIENCE)[-1, -1]) == 7


def test_an_error_is_raised_while_others_are_computed_and_one_may_be_asked_for_twice() -> None:
    slow, small = late.remote(PATIENCE), pictures.remote(1)
    with pytest.raises(ZeroDivisionError):
        get([slow, failing.remote()])
    assert not ray.wait([slow], timeout=0)[0], "the error was raised once the other had ended"
    ray.cancel(slow, force=True)
    assert [len(found) for found in get([small, small])] == [1, 1]
    assert get([]) == []


def test_what_comes_first_may_come_while_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides, after neither was there and before it is counted what there is to wait for."""
    answers, others, look = [late.remote(0.5)], [late.remote(0.5)], waiting._existing
    looks = []

    def after_all_have_come(refs: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
        looks.append(len(refs))
        if len(refs) == 2:
            ray.wait(refs, num_returns=2)
        return look(refs)

    monkeypatch.setattr(waiting, "_existing", after_all_have_come)
    assert come_first(answers, others)
    assert looks == [1, 1, 2, 1]
