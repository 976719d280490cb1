# SPDX-License-Identifier: Apache-2.0
"""Nobody else is given a port between its choice and the server's begin."""

import socket
from pathlib import Path

import pytest

from tasks.system import ports
from tasks.system.ports import AFTER_RAYS, KERNELS, LOOPBACK, bound, free_port


def test_it_is_none_that_the_kernel_or_ray_gives() -> None:
    given = int(KERNELS.read_text().split()[0])
    if given <= AFTER_RAYS:
        pytest.skip("this kernel gives nearly all ports")
    drawn = [free_port() for _ in range(50)]
    assert all(AFTER_RAYS <= port < given for port in drawn)
    assert len(set(drawn)) > 1, "two that ask at once hardly get the same"


def test_a_taken_one_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two ports one is taken."""
    with socket.socket() as taken:
        first = next(port for port in range(AFTER_RAYS, AFTER_RAYS + 5000, 2) if _both_free(port))
        taken.bind((LOOPBACK, first))
        taken.listen()
        (tmp_path / "range").write_text(f"{first + 2}\t60999\n")
        monkeypatch.setattr(ports, "KERNELS", tmp_path / "range")
        monkeypatch.setattr(ports, "AFTER_RAYS", first)
        assert {free_port() for _ in range(20)} == {first + 1}
        with pytest.raises(OSError, match="in use"):
            bound(first)


@pytest.mark.parametrize("said", [None, "1024\t60999\n"], ids=["no Linux", "nearly all"])
def test_where_the_kernel_gives_any_any_has_to_do(
    said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if said is not None:
        (tmp_path / "range").write_text(said)
    monkeypatch.setattr(ports, "KERNELS", tmp_path / "range")
    assert free_port() > 1023


def _both_free(port: int) -> bool:
    try:
        return (bound(port), bound(port + 1)) == (port, port + 1)
    except OSError:
        return False
