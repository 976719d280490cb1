# SPDX-License-Identifier: Apache-2.0
"""Lanes of real processes: which begin when, on which processors, and what ends them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.lanes import read_plan
from benchmarks.local_services import ROOT
from tasks.system.processes import identity
from tests.support.patience import PATIENCE, wait_until
from tests.support.processes import with_word


def written(folder: Path, text: str) -> Path:
    plan = folder / "plan.yaml"
    plan.write_text(text)
    return plan


def follow(folder: Path, text: str, *options: str) -> tuple[int, dict[str, str]]:
    """The command's exit code, and how each lane has ended."""
    command = [sys.executable, "-m", "benchmarks.lanes", str(written(folder, text)), "--folder", str(folder / "logs")]
    code = subprocess.run([*command, *options], cwd=ROOT, check=False, timeout=PATIENCE).returncode
    lines = (folder / "logs" / "lanes.jsonl").read_text().splitlines()
    return code, {line["lane"]: line["end"] for line in map(json.loads, lines)}


def test_a_lane_begins_when_those_before_it_have_ended(tmp_path: Path) -> None:
    code, ends = follow(
        tmp_path,
        f"""
- {{name: data, run: "sleep 0.5; touch {tmp_path}/made"}}
- {{name: reads, needs: [data], run: "test -e {tmp_path}/made"}}
- {{name: fails, run: "exit 3"}}
- {{name: left, needs: [reads, fails], run: "touch {tmp_path}/never"}}
- {{name: then, after: [fails], run: "true"}}
- {{name: nowhere, folder: {tmp_path}/nowhere, run: "true"}}
""",
    )
    assert code == 1
    assert ends == {
        "data": "ended",
        "reads": "ended",
        "fails": "failed with exit code 3",
        "left": "not begun, as fails did not end well",
        "then": "ended",
        "nowhere": f"not begun: {tmp_path}/nowhere: No such file or directory",
    }
    assert not (tmp_path / "never").exists()


def test_a_lane_has_its_gpus_processors_and_folder(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    asked = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.sched_getaffinity(0), os.getcwd())"
    code, _ = follow(
        tmp_path, f'- {{name: asks, gpus: "2,3", cores: "{core}", folder: {tmp_path}, run: "python -c \\"{asked}\\""}}'
    )
    assert code == 0
    assert (tmp_path / "logs" / "asks.log").read_text().split(maxsplit=1) == ["2,3", f"{{{core}}} {tmp_path}\n"]


def test_limits_and_only(tmp_path: Path) -> None:
    plan = """
- {name: long, limit: 0.5, run: sleep 7200}
- {name: longer, run: sleep 7201}
- {name: other, run: "exit 1"}
"""
    code, ends = follow(tmp_path, plan, "--limit", "5", "--only", "long", "longer")
    assert (code, ends) == (1, {"long": "its limit came", "longer": "ended with the plan"})


def test_what_is_left_out_is_not_waited_for_but_what_that_waits_for_is(tmp_path: Path) -> None:
    """Else two lanes would have a GPU at a time that the plan gives to one after the other."""
    plan = written(
        tmp_path,
        """
- {name: data, run: a}
- {name: first, needs: [data], run: a}
- {name: second, after: [first], run: a}
- {name: third, needs: [first], after: [second], run: a}
- {name: fourth, after: [third], run: a}
""",
    )
    assert [(lane.name, lane.needs, lane.after) for lane in read_plan(plan, ["data", "third", "fourth"])] == [
        ("data", (), ()),
        ("third", ("data",), ("data",)),
        ("fourth", (), ("third",)),
    ]
    assert [(lane.name, lane.needs, lane.after) for lane in read_plan(plan, ["first", "fourth"])] == [
        ("first", (), ()),
        ("fourth", (), ("first",)),
    ]


def test_a_signal_ends_what_lanes_have_started(tmp_path: Path) -> None:
    plan = written(tmp_path, f'- {{name: parent, run: "sleep 7200 & echo $! > {tmp_path}/child; wait"}}')
    command = [sys.executable, "-m", "benchmarks.lanes", str(plan), "--folder", str(tmp_path / "logs")]
    process = subprocess.Popen(command, cwd=ROOT)
    child = tmp_path / "child"
    pid = int(wait_until(lambda: child.exists() and child.read_text().strip(), "the lane's start", every=0.05))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) != 0
    assert identity(pid) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {name: a}", "no plan"),
        ("- {name: a, run: b, gpu: '0'}", "no plan"),
        ("- {name: a, run: b}\n- {name: a, run: b}", "two lanes named a"),
        ("- {name: a, run: b, after: [c]}", "a waits for c, which does not stand before it"),
        ("- {name: a, run: b, needs: [c]}", "a waits for c, which does not stand before it"),
    ],
)
def test_a_wrong_plan_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        read_plan(written(tmp_path, text))


def test_the_plans_here_are_plans_and_their_commands_are_there() -> None:
    plans = [*(ROOT / "benchmarks" / "plans").glob("*.yaml")]
    assert plans
    for plan in plans:
        for lane in read_plan(plan):
            modules = [words.split()[0] for words in lane.run.split("python -m ")[1:]]
            assert modules
            for module in modules:
                assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_what_a_lanes_shell_has_begun_may_end_in_order(tmp_path: Path) -> None:
    """The shell is gone at once."""
    (tmp_path / "ends.py").write_text(
        f"""
import pathlib, signal, sys, time
def end(*_):
    time.sleep(1)
    pathlib.Path("{tmp_path}/ended").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
time.sleep(60)
"""
    )
    code, ends = follow(tmp_path, f'- {{name: long, limit: 10, run: "python {tmp_path}/ends.py && true"}}')
    assert (code, ends) == (1, {"long": "its limit came"})
    assert (tmp_path / "ended").exists()


FOLLOWS = """
import sys
from pathlib import Path

from benchmarks.followed_runs import Job, follow

folder = Path(sys.argv[1])
follow([Job("run", 0, "flow-grpo", [], folder / "run")], folder / "log.jsonl")
"""


def test_sigterm_ends_the_runs_that_a_benchmark_follows(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FOLLOWS, str(tmp_path)], cwd=ROOT) as process:
        parent = psutil.Process(process.pid)
        (run,) = wait_until(lambda: with_word(parent.children(), "flows.train"), "the run's begin", every=0.2)
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert identity(run.pid) is None
