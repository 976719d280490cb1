# SPDX-License-Identifier: Apache-2.0
"""A benchmark whose runs fail goes on with the others, and ends with 1 and a line that names them and their logs."""

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import endings, iteration, kill_rounds, learning, lost_machines, outages, two_machines, words_algorithms
from benchmarks.endings import Moment, Watched
from benchmarks.failures import NotMeasured
from benchmarks.followed_runs import Job, follow, read_lines
from benchmarks.kill_rounds import Round
from benchmarks.local_services import ROOT
from tests.support.patience import PATIENCE

REFUSED = "trainer.nothing=1"
"""A change that the flow refuses as it starts."""
NO_PROMPTS = "data.prompts=no-prompts.parquet"
"""One that a config may have, and no run gets beyond."""


def error_of(module: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a benchmark says as it ends with 1."""
    monkeypatch.setattr(sys, "argv", [module, *given])
    with pytest.raises(SystemExit) as found:
        import_module(f"benchmarks.{module}").main()
    said = found.value.code
    assert isinstance(said, str), "a text is the exit code 1"
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("words --seeds 0 1 --set", {"words (seed 0)": "words-0", "words (seed 1)": "words-1"}),
        (
            "words_algorithms --seeds 0 --algorithms awm flow_grpo --at-once 2 --set",
            {"awm (seed 0)": "awm-0", "flow_grpo (seed 0)": "flow_grpo-0"},
        ),
        (
            "fewer_images --seeds 0 --runs awm flow_grpo --iterations",
            {"awm (seed 0)": "awm-0", "flow_grpo (seed 0)": "flow_grpo-0"},
        ),
    ],
)
def test_runs_that_fail_are_named_with_their_logs(
    command: str, runs: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And none of them keeps the next one from its turn."""
    module, *given = command.split()
    given += ["-1" if module == "fewer_images" else REFUSED]
    given += ["--folder", str(tmp_path / "runs"), "--log", str(tmp_path / "log.jsonl")]
    said = error_of(module, given, monkeypatch)
    logs = {name: tmp_path / "runs" / folder / "log.txt" for name, folder in runs.items()}
    parts = said.removeprefix("error: ").split("; ")
    assert sorted(parts) == sorted(f"{name} failed with exit code 2, see {log}" for name, log in logs.items())
    assert all("error: --set: " in log.read_text() for log in logs.values())


def test_a_run_that_its_limit_ends_has_not_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path, "exec sleep 600"))  # where the command trains
    jobs = [Job("run", seed, "flow-grpo", [], tmp_path / f"run-{seed}") for seed in (0, 1)]
    assert follow(jobs, tmp_path / "log.jsonl", limit=0.1) == []
    (line,) = read_lines([tmp_path / "log.jsonl"])
    assert (line["seed"], line["end"]) == (0, "limit")


def test_a_student_whose_teacher_is_not_there_has_failed_unless_the_time_was_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["--algorithms", "distill_kl", "--folder", str(tmp_path), "--log", str(tmp_path / "log.jsonl")]
    said = error_of("words_algorithms", given, monkeypatch)
    assert said == "error: distill_kl not begun, as diffusion_nft has exported no weights yet"
    monkeypatch.setattr(sys, "argv", ["words_algorithms", *given, "--limit", "0"])
    words_algorithms.main()


def test_both_loops_of_a_reward_that_fail_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    log, public, own = tmp_path / "log.jsonl", "public loop, our settings", "words"
    given = ["--runs", public, own, "--log", str(log), "--set", NO_PROMPTS]
    first, second = error_of("time_to_reward", given, monkeypatch).removeprefix("error: ").split("; ")
    assert first == f"{public} (seed 0) failed with exit code 1, see {tmp_path / 'public-loop-our-settings-0/log.txt'}"
    assert second.startswith(f"{own} (seed 0) failed with exit code ")
    assert second.endswith(f", see {tmp_path / 'words-0/log.txt'}")
    for folder in ("public-loop-our-settings-0", "words-0"):
        assert (tmp_path / folder / "log.txt").stat().st_size > 0
    assert [line["run"] for line in read_lines([log]) if line["end"].startswith("failed")] == [public, own]


def test_a_cell_that_fails_is_named_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = ["flow-grpo", "--device", "cpu", "--gpus", "1", "2", "--prompts", "6", "--set", NO_PROMPTS]
    given += ["--folder", str(tmp_path / "runs"), "--log", str(tmp_path / "log.jsonl")]
    parts = error_of("scaling", given, monkeypatch).removeprefix("error: ").split("; ")
    cells = ["weak 1 (6 prompts)", "weak 2 (12 prompts)"]
    assert [part.partition(" (seed 0) failed with exit code ")[0] for part in parts] == [
        f"flow-grpo, {cell}" for cell in cells
    ]
    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert [line["cell"] for line in lines if line["end"].startswith("failed")] == cells


def test_a_cell_that_is_no_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its few samples make no micro-batch of the recipe's for each rank."""
    given = ["flow-grpo", "--device", "cpu", "--kinds", "strong", "--gpus", "2", "--prompts", "1"]
    given += ["--folder", str(tmp_path / "runs"), "--log", str(tmp_path / "log.jsonl")]
    said = error_of("scaling", given, monkeypatch)
    assert said.startswith("error: strong 2 (2 prompts) is left out: ")
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"found": False}, ["no driver was there to kill in update"]),
        ({"equal": False, "difference": "other weights"}, ["driver killed in update: other weights"]),
        (
            {"equal": False, "redone": ["rollout 2"]},
            ["driver killed in update: done twice: ['rollout 2']; left over: []"],
        ),
        ({}, []),
    ],
)
def test_rounds_without_a_kill_or_with_a_difference_are_named(
    change: dict[str, Any],
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A victim that one round missed and another has killed is not missing."""
    plain = Round("driver", 2, "update", 1, True, True, 3.0, [], [], None)
    entry = vars(plain) | {"equal": plain.equal}
    missed = entry | {"victim": "raylet", "found": False}
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{json.dumps(one)}\n" for one in (entry | change, missed, missed | {"found": True})))
    given = ["--rounds", "0", "--log", str(log)]
    if said:
        assert error_of("kill_rounds", given, monkeypatch) == f"error: {'; '.join(said)}"
    else:
        monkeypatch.setattr(sys, "argv", ["kill_rounds", *given])
        kill_rounds.main()
    assert "| raylet | 1 | 1 | update 1 | 1 | 3.0 (3.0) |" in capsys.readouterr().out


def test_an_algorithm_that_fails_is_named_and_leaves_the_page_of_all_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(learning, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(learning, "DOCS", tmp_path)
    monkeypatch.setitem(learning.SETTINGS, "dpo", [REFUSED])
    for seed in (0, 1):
        record = tmp_path / "runs" / f"awm-{seed}" / "curve.json"
        record.parent.mkdir(parents=True)
        curve = learning.Curve("awm", seed, [0.0, 10.0], [0.0, 5.0], [0.5, 0.7 + seed / 10])
        record.write_text(json.dumps(asdict(curve)))
    given = ["--seeds", "0", "1", "--algorithms", "dpo", "distill_kl", "awm"]
    said = error_of("learning", given, monkeypatch).removeprefix("error: ").split("; ")
    log = tmp_path / "runs" / "dpo-0" / "log.txt"
    assert said[0] == f"dpo-0: flows.train failed with exit code 2, see {log}"
    assert "trainer has no field 'nothing'" in log.read_text()
    teacher = tmp_path / "runs" / "flow_grpo-0"
    assert said[2:4] == [f"distill_kl-{seed}: not begun, as {teacher} has no exported weights" for seed in (0, 1)]
    assert said[4:] == [f"{tmp_path / 'learning.md'} stays as it is"]
    assert "| `awm` | 0.500 | 0.700, 0.800 |" in capsys.readouterr().out
    assert not (tmp_path / "learning.md").exists()


def test_an_algorithm_without_a_run_leaves_the_page_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The table lost its row, which nobody was told."""
    log, page = tmp_path / "log.jsonl", tmp_path / "page.md"
    log.write_text("")
    as_it_was = "<!-- benchmarks/words_algorithms.py -->\nas it was\n<!-- end -->\n"
    page.write_text(as_it_was)
    given = ["--write", "--log", str(log), "--page", str(page), "--picture", str(tmp_path / "picture.png")]
    said = error_of("words_algorithms", [*given, "--algorithms", "flow_grpo", "awm"], monkeypatch)
    assert said == "error: flow_grpo is in none of the logs; awm is in none of the logs"
    assert page.read_text() == as_it_was
    assert [*tmp_path.glob("*.png")] == []


def program(folder: Path, text: str) -> str:
    """A program of the shell, to stand in the place of Python."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_that_ends_before_its_signal_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It had a row with its own exit code, as if the signal had ended it."""
    never = Moment(("-c", "print('what was wrong'); raise SystemExit(3)"), lambda watched: False)
    monkeypatch.setitem(endings.MOMENTS, "update", never)
    monkeypatch.setitem(endings.MOMENTS, "imports", never)
    log = tmp_path / "log.jsonl"
    said = error_of("endings", ["--moments", "update", "imports", "--log", str(log)], monkeypatch)
    ended = "the command ended with exit code 3 before its moment: what was wrong"
    assert said == f"error: update: {ended}; imports: {ended}"
    assert not log.exists()


@pytest.mark.parametrize("module", [outages, lost_machines])
def test_cases_that_do_not_come_are_named_after_the_others(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, *others = module.CASES
    row = dict.fromkeys(("load", "lines", "warnings", "held", "lost_s", "back_s", "on_s", "code"), 0)
    row |= dict.fromkeys(("first_s", "ended_s", "again"), 0)

    def measure(name: str, base: Path) -> dict[str, Any]:
        if name == first:
            raise TimeoutError("the update did not come within 900 s")
        return row | {"case": name}

    monkeypatch.setattr(module, "measure", measure)
    log = tmp_path / "log.jsonl"
    said = error_of(module.__name__.rpartition(".")[2], ["--log", str(log)], monkeypatch)
    assert said == f"error: {first}: the update did not come within 900 s"
    assert [json.loads(line)["case"] for line in log.read_text().splitlines()] == others


def test_a_run_that_ends_before_its_machine_is_lost_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such recipe'); raise SystemExit(2)"]
    watched = Watched.started(command, tmp_path, dict(os.environ))
    watched.process.wait(PATIENCE)
    with pytest.raises(NotMeasured, match="ended with exit code 2 before an update: no such recipe"):
        watched.refuse_ended("an update")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"failed": "iteration 2 did not come within 300 s"}, "words: iteration 2 did not come within 300 s"),
        ({"failed": None, "code_again": 1}, "words: the command that was to go on ended with exit code 1"),
    ],
)
def test_a_run_on_two_machines_that_is_not_whole_is_named(
    row: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(two_machines, "measure", lambda chosen, base: {"recipe": "words"} | row)
    assert error_of("two_machines", ["words", "--log", str(tmp_path / "log.jsonl")], monkeypatch) == f"error: {said}"
    monkeypatch.setattr(two_machines, "measure", lambda *_: {"recipe": "words", "failed": None, "code_again": 0})
    two_machines.main()


@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("rollout", ["--only", "diffusers, LoRA", "diffusers, eager"]),
        ("iteration", ["--model", "tiny", "--device", "cpu", "--variants", "eager", "and recorded"]),
    ],
)
def test_variants_that_fail_are_named_after_the_others(
    module: str, given: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path, "exit 3"))
    variants = given[-2:]
    said = error_of(module, [*given, "--work", str(tmp_path / "work")], monkeypatch)
    assert sorted(said.removeprefix("error: ").split("; ")) == sorted(
        f"{variant} failed with exit code 3, see above" for variant in variants
    )


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They would wait for it."""
    monkeypatch.setattr(sys, "executable", program(tmp_path, "[ $RANK = 1 ] && exit 3\nexec sleep 600"))
    assert iteration._run_ranks(2, "any") == 3
