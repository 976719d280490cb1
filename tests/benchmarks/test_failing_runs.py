# SPDX-License-Identifier: Apache-2.0
"""A benchmark whose runs fail goes on with the others, and ends with 1 and a line that names them and their logs."""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import learning, words_algorithms
from benchmarks.followed_runs import Job, follow, read_lines
from benchmarks.local_services import ROOT

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
    long = tmp_path / "long"
    long.write_text("#!/bin/sh\nexec sleep 600\n")
    long.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(long))  # in the place of the command that trains
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
