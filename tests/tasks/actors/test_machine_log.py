# SPDX-License-Identifier: Apache-2.0
"""What is said of lost machines, in whichever order a look finds the loss and the actors' return; without a cluster."""

import logging

import pytest

from tasks.actors.machines import REMINDER_S, MachineLog

RANK, WORKER = ("trainer", 0), ("reward", 0)
LOST = {"a": "first (10.0.0.1)"}
GONE = "machine lost: first (10.0.0.1), and with it "
AGAIN = "reward 0 will be started elsewhere, to do again what was not finished"
BACK = "reward 0 is back, on another machine"
NOT_BACK = "reward 0 is not back yet: it waits for room on a machine of the cluster"


@pytest.fixture
def machines() -> MachineLog:
    """Of a rank that is not started again and a worker that is."""
    return MachineLog({"trainer": False, "reward": True}, logging.getLogger("a run"))


def test_a_loss_is_told_and_then_the_return(machines: MachineLog, caplog: pytest.LogCaptureFixture) -> None:
    assert machines.tell({RANK: "a", WORKER: "a"}, {}) == []
    assert machines.tell({RANK: "a", WORKER: "a"}, LOST) == [WORKER]
    assert caplog.messages == [f"{GONE}trainer 0, reward 0; {AGAIN}"]
    assert machines.tell({RANK: "a", WORKER: "a"}, LOST) == [], "it has been asked already"
    assert machines.tell({RANK: "a", WORKER: "b"}, LOST) == []
    assert machines.tell({RANK: "a", WORKER: "b"}, LOST) == []
    assert caplog.messages[1:] == [BACK]
    assert machines.count == 1


def test_both_are_told_of_a_worker_that_is_back_before_the_look(
    machines: MachineLog, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where all that the machine held is back: it is lost and counted all the same."""
    machines.tell({RANK: "b", WORKER: "a"}, {})
    assert machines.tell({RANK: "b", WORKER: "b"}, LOST) == [], "it has answered from where it is"
    assert machines.tell({RANK: "b", WORKER: "b"}, LOST) == []
    assert caplog.messages == [f"{GONE}reward 0; {AGAIN}", BACK]
    assert machines.count == 1


def test_both_are_told_of_two_machines_one_after_the_other(
    machines: MachineLog, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker is on its second machine when a look finds both lost."""
    machines.tell({WORKER: "a"}, {})
    machines.tell({WORKER: "b"}, LOST | {"b": "second (10.0.0.2)"})
    assert sorted(caplog.messages) == [
        f"{GONE}reward 0; {AGAIN}",
        f"machine lost: second (10.0.0.2), and with it reward 0; {AGAIN}",
    ]
    machines.tell({WORKER: "c"}, LOST | {"b": "second (10.0.0.2)"})
    assert caplog.messages[2:] == [BACK]
    assert machines.count == 2


def test_nothing_is_told_of_machines_without_the_run(machines: MachineLog, caplog: pytest.LogCaptureFixture) -> None:
    """One that it was never on, and one that its worker had left by itself before; who has not answered is nowhere."""
    machines.tell({RANK: None, WORKER: "a"}, {"c": "third (10.0.0.3)"})
    machines.tell({RANK: None, WORKER: "b"}, {})
    assert machines.tell({RANK: "b", WORKER: "b"}, LOST) == []
    assert not caplog.messages
    assert machines.count == 0


def test_a_worker_that_finds_no_room_is_told_again_and_again(
    machines: MachineLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [0, REMINDER_S, REMINDER_S + 1, 2 * REMINDER_S, 2 * REMINDER_S + 2]
    for now in looks:
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        machines.tell({WORKER: "a"}, LOST)
    assert caplog.messages == [f"{GONE}reward 0; {AGAIN}", NOT_BACK, NOT_BACK]
