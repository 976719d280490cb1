# SPDX-License-Identifier: Apache-2.0
"""The tables of runs on GPUs are what the kept logs say."""

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from benchmarks import time_to_reward, words, words_algorithms
from benchmarks.followed_runs import Curve, curves_of, read_lines
from benchmarks.local_services import ROOT
from benchmarks.logs import rows_in
from tasks.config.recipes import load_recipe

MEASURED = ROOT / "benchmarks" / "measured"
TEN = [*words_algorithms.SETTINGS]
FEWER = [
    "diffusion_nft",
    "diffusion_nft, each its own noise",
    "diffusion_nft, best and worst 4",
    "awm",
    "awm, adaptive weights",
    "flow_grpo",
    "flow_grpo, best and worst 4",
    "flow_grpo, one step a group",
]


@pytest.mark.parametrize(
    ("logs", "table", "page", "rows"),
    [
        (["words_algorithms"], words_algorithms.table, "words", None),
        (["words_algorithms_h200", "words_algorithms_h200_rest"], words_algorithms.table, "words", TEN),
        (["words_algorithms_h200"], words_algorithms.table, "algorithms", FEWER),
        (["time_to_reward_seeds_h200"], time_to_reward.table, "words", None),
        (["time_to_reward_h200", "time_to_reward_two_h200"], time_to_reward.table, "words-tried", None),
        (["time_to_reward"], time_to_reward.table, "words-tried", None),
    ],
)
def test_a_page_has_the_table_of_its_logs(
    logs: Sequence[str], table: Callable[[Any], str], page: str, rows: Sequence[str] | None
) -> None:
    curves = words_algorithms.chosen(curves_of(read_lines([MEASURED / f"{log}.jsonl" for log in logs])), rows)
    assert list(curves) == list(rows or curves) != []
    assert table(curves) in (ROOT / "docs" / f"{page}.md").read_text()


@pytest.mark.parametrize(
    ("log", "count", "first"),
    [
        ("words_h100", 7, "| words, base model of .481 | 0, 2 | 0.481 | 0.875, 0.870 | 0.875, 0.870 |"),
        ("words_h200", 11, "| words | 0, 1, 2 | 0.529 | 0.905, 0.887, 0.898 | 0.908, 0.900, 0.910 |"),
    ],
)
def test_what_the_page_says_of_the_words_is_in_its_log(log: str, count: int, first: str) -> None:
    rows = words.table(curves_of(read_lines([MEASURED / f"{log}.jsonl"]))).splitlines()[2:]
    assert set(rows) <= set((ROOT / "docs" / "words.md").read_text().splitlines())
    assert len(rows) == count
    assert rows[0].startswith(first)


def test_the_scaling_of_the_whole_flow_is_in_its_log() -> None:
    lines = rows_in(MEASURED / "sd35_flow_h200.jsonl")
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    speeds: dict[int, float] = {}
    for gpus, run in {1: "1 GPU of four", 2: "2 GPUs of four", 4: "4 GPUs"}.items():
        steady = [line for line in lines if line["run"] == run and 2 < line["iteration"] < 5]
        assert len(steady) == 2
        seconds = {name: median(line[f"timing_s/{name}"] for line in steady) for name in ("step", "update_actor")}
        speeds[gpus] = steady[0]["perf/total_num_images"] / seconds["step"]
        row = next(line for line in page.splitlines() if line.startswith(f"| {run} | {96 * gpus} |"))
        assert f"| {seconds['update_actor']:.2f} |" in row
        assert f"| {seconds['step']:.1f} | {speeds[gpus]:.2f} |" in row
        assert gpus == 1 or f"**{speeds[gpus] / gpus / speeds[1]:.1%}**".replace("%", " %") in row


def test_the_flow_and_its_engines_of_one_call_are_in_their_log() -> None:
    lines = rows_in(MEASURED / "sd35_flow_h100.jsonl")
    (engines,) = [line for line in lines if line["run"] == "bare engines, of four GPUs"]
    steady = [line for line in lines if line["run"] == "2 GPUs of four" and 2 < line["iteration"] < 5]
    assert len(steady) == 2
    parts = ("update_actor", "update_weights", "step")
    update, sync, step = (median(line[f"timing_s/{name}"] for line in steady) for name in parts)
    speed = steady[0]["perf/total_num_images"] / step
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
    assert engines["batch"] * 4 == 96
    ours = next(line for line in page if line.startswith("| bare engines, 24 pictures, times four | 96 | "))
    assert ours.startswith(f"| bare engines, 24 pictures, times four | 96 | {4 * engines['rollout_s']:.2f} |")
    assert f"| {4 * engines['update_s']:.2f} | {4 * engines['sync_s']:.2f} |".replace(" 0.", " .") in ours
    assert f"| {engines['images/s']:.2f} |" in ours
    row = next(line for line in page if line.startswith("| 2 GPUs of four H100s | 192 |"))
    assert f"| {update:.2f} | {sync:.2f} |".replace(" 0.", " .") in row
    assert f"| {step:.1f} | {speed:.2f} |" in row
    assert f"**{speed / 2 / engines['images/s']:.2f} of".replace("*0.", "*.") in row


def test_one_gpu_and_its_engines_of_one_call_are_in_their_log() -> None:
    lines = rows_in(MEASURED / "sd35_flow_h200.jsonl")
    (engines,) = [line for line in lines if line["run"] == "bare engines, after it, on the same GPU"]
    steady = [
        line for line in lines if line["run"] == "1 GPU of two, two batches in hand" and 2 < line["iteration"] < 6
    ]
    parts = ("gen", "reward", "update_actor", "update_weights", "step")
    rollout, scores, update, sync, step = (median(line[f"timing_s/{part}"] for line in steady) for part in parts)
    speed = 96 / step
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
    row = f"| one GPU | **{rollout:.2f}** | {scores:.2f} | {update:.2f} | {sync:.2f} | .15 | {step:.2f} | {speed:.2f} |"
    (said,) = [line for line in page if line.startswith(row.replace(" 0.", " ."))]
    assert f"**{speed / engines['images/s']:.2f} of the engines'".replace("*0.", "*.") in said
    assert f"| {4 * engines['rollout_s']:.2f} | | {4 * engines['update_s']:.2f} |" in "".join(page)


def test_one_gpu_and_the_same_work_of_its_engines_are_in_their_log() -> None:
    """Where the engines make the recipe's own optimiser steps, nothing is counted."""
    *_, flow, engines = rows_in(MEASURED / "sd35_flow_h200.jsonl")
    parts = ("gen", "reward", "update_actor", "update_weights", "step")
    rollout, scores, update, sync, step = (flow[f"timing_s/{part}"] for part in parts)
    rest = step - rollout - scores - update - sync
    work = engines["rollout_s"] + engines["update_s"] + engines["sync_s"]
    speeds, share = (96 / work, 96 / step), work / step
    assert engines["optimizer_steps"] == 2
    assert engines["images/s"] == pytest.approx(speeds[0], abs=1e-3)
    assert share >= 0.97
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
    of_engines = f"| {engines['rollout_s']:.2f} | | {engines['update_s']:.2f} | {engines['sync_s']:.2f} |"
    assert f"two optimiser steps {of_engines} | {work:.1f} | {speeds[0]:.2f} |".replace(" 0.", " .") in "".join(page)
    numbers = " | ".join(f"{number:.2f}" for number in (rollout, scores, update, sync, rest, step, speeds[1]))
    row = f"six rows | {numbers} | **{share:.3f} of the engines'**"
    assert row.replace(" 0.", " .").replace("*0.", "*.") in "".join(page)


@pytest.mark.parametrize(
    ("run", "said"),
    [("4 GPUs", "**4.1 s, 497 pictures a second**"), ("4 H200s, before", "An iteration takes 4.4 s (median)")],
)
def test_the_words_on_four_gpus_take_what_the_page_says(run: str, said: str) -> None:
    lines = rows_in(MEASURED / "words_four_iterations.jsonl")
    steps = [line["timing_s/step"] for line in lines if line["run"] == run and line["iteration"] % 10]
    step = median(steps[1:])
    assert f"{step:.1f} s" in said
    assert said in (ROOT / "docs" / "words-tried.md").read_text()


def test_the_quickstarts_command_read_what_the_page_says() -> None:
    page = (ROOT / "docs" / "words.md").read_text()
    seconds, readings = of_command("words_command_h200")
    assert [*readings] == [0, 10, 20, load_recipe("words").trainer.total_training_steps]
    before, *later, last = readings.values()
    (said,) = [line for line in page.splitlines() if line.startswith("**As one command on an H200**")]
    assert f"{before} -> {', '.join(later)} and **{last}** after" in said
    assert f"{seconds} s an iteration (median): rollout" in page
    page = (ROOT / "docs" / "words-tried.md").read_text()
    seconds, readings = of_command("words_command_before_h200")
    assert [*readings] == [0, 10, 20, 30, 40]
    before, *later, last = readings.values()
    assert f"{seconds} s an iteration, and read" in page
    assert f"{before} -> {', '.join(later)} and {last}:" in page


def of_command(log: str) -> tuple[str, dict[int, str]]:
    """Median seconds of an iteration, and the held-out readings by iteration, as a page has them."""
    lines = rows_in(MEASURED / f"{log}.jsonl")
    readings = {line["iteration"]: line["held_out"] for line in lines if line["held_out"] is not None}
    said = {iteration: f"{value:.3f}".removeprefix("0") for iteration, value in readings.items()}
    return f"{median(line['seconds'] for line in lines[1:]):.1f}", said


def test_the_command_went_the_way_of_the_recipes_first_seed() -> None:
    command = rows_in(MEASURED / "words_command_h200.jsonl")
    first = next(one for one in curves_of(read_lines([MEASURED / "words_h200.jsonl"]))["words"] if one.seed == 0)
    assert len(command) == 31
    for kind, logged in (("reward", "reward"), ("held_out", "read")):
        for now, before in zip(command, first.lines, strict=False):
            # A terminal has three digits, of which the log's four make either where they end in 5.
            assert now[kind] == (None if before[logged] is None else pytest.approx(before[logged], abs=5.5e-4))


def test_what_is_read_on_the_gpu_takes_what_the_page_says() -> None:
    lines = rows_in(MEASURED / "words_gpu_h200.jsonl")
    ends = [line["seconds"] for line in lines if line.get("end") == "finished"]
    page = (ROOT / "docs" / "words.md").read_text().split("**641 and 491 pictures a second**")[1]
    rows = {
        cells[0]: [cell.strip(" *") for cell in cells[1:]]
        for cells in ([cell.strip() for cell in row.strip("|").split("|")] for row in page.splitlines() if "|" in row)
    }
    stages = {"rollout, s": "gen", "update": "update_actor", "weights' way": "update_weights", "iteration, s": "step"}
    stages |= {"scores that come after its end": "reward"}
    for said, stage in stages.items():
        assert [float(cell) for cell in rows[said][:2]] == [pytest.approx(end[stage], abs=0.0051) for end in ends]
    speeds = [f"{images / end['step']:.0f}" for images, end in zip((2048, 512), ends, strict=True)]
    assert rows["pictures a second, measurements left out"][:2] == speeds
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{speeds[1]} pictures a second by Flow-GRPO and {speeds[0]} by DiffusionNFT" in readme
    one, two = (
        [line["reward"] for line in lines if line["run"].endswith(name) and line.get("reward")]
        for name in ("one batch in hand", "GPU, larger passes")
    )
    assert one == two[: len(one)]
    assert len(one) == 11


def test_passes_that_are_filled_up_make_what_the_page_says() -> None:
    page = " ".join((ROOT / "docs" / "words.md").read_text().split())
    guarded = curves_of(read_lines([MEASURED / "words_on_the_gpu_h200.jsonl"]))
    as_it_is, at_once = (
        next(curve for run, (curve,) in guarded.items() if run.endswith(end)) for end in ("larger passes", "at once")
    )
    each, all_at_once = (iterations_of(curve)[1:] for curve in (as_it_is, at_once))
    assert f"takes {median(each):.2f} s an iteration, **{2048 / median(each):.0f} pictures a second**" in page
    assert f"({2048 * len(each) / sum(each):.0f} over all but the first of twelve iterations" in page
    assert f"{median(all_at_once):.2f}, {2048 / median(all_at_once):.0f}" in page
    for curve in (as_it_is, at_once):
        assert f"{curve.measured[-1]['held_out']:.3f}".removeprefix("0") in page
    seeds = curves_of(read_lines([MEASURED / "time_to_reward_seeds_h200.jsonl"]))
    for run, images, said in (
        ("words, read on the GPU, larger passes", 2048, "3.34 s, 614"),
        ("words-flow-grpo, read on the GPU", 512, "1.20 s, **426**"),
    ):
        seconds = median(iterations_of(seeds[run][0])[1:])
        assert said.replace("*", "").split()[0] == f"{seconds:.2f}"
        assert said.replace("*", "").split()[-1] == f"{images / seconds:.0f}"
        assert said in page


def iterations_of(curve: Curve) -> list[float]:
    return [after["training_s"] - before["training_s"] for before, after in pairwise(curve.lines)]


def test_the_two_loops_take_to_a_reward_what_the_page_says() -> None:
    seeds = curves_of(read_lines([MEASURED / "time_to_reward_seeds_h200.jsonl"]))
    page = " ".join((ROOT / "docs" / "words.md").read_text().split())
    first, stays, iterations = list[list[float]](), list[list[float]](), list[list[float]]()
    for run in ("words-flow-grpo", "public loop, our settings"):
        of_run = sorted(seeds[run], key=lambda curve: curve.seed)
        first.append([curve.first_at(0.7)["training_s"] for curve in of_run])
        stays.append([1 + max(n for n, line in enumerate(c.measured) if line["held_out"] < 0.7) for c in of_run])
        stays[-1] = [curve.measured[at]["training_s"] for curve, at in zip(of_run, stays[-1], strict=True)]
        iterations.append([median(iterations_of(curve)[1:]) for curve in of_run])
    (ours, theirs), (kept, theirs_kept), (each, theirs_each) = first, stays, iterations
    assert (
        f"first reads .7 after {ours[0]:.0f} and {ours[1]:.0f} s of training here and after {theirs[0]:.0f} and "
        f"{theirs[1]:.0f} s there, {theirs[0] / ours[0]:.1f} and {theirs[1] / ours[1]:.1f} times"
    ) in page
    assert (
        f"From {kept[0]:.0f} and {kept[1]:.0f} s on no reading here is below .7, and from {theirs_kept[0]:.0f} and "
        f"{theirs_kept[1]:.0f} s on none there: {theirs_kept[0] / kept[0]:.1f} and {theirs_kept[1] / kept[1]:.1f} times"
    ) in page
    assert (
        f"An iteration takes {each[0]:.2f} and {each[1]:.2f} s here and {theirs_each[0]:.2f} and {theirs_each[1]:.2f} "
        f"there (medians), {theirs_each[0] / each[0]:.1f} and {theirs_each[1] / each[1]:.1f} times"
    ) in page
    (fast,), (slow, _) = seeds["words"], sorted(seeds["public loop, our settings"], key=lambda curve: curve.seed)
    assert slow.first_at(0.8) is None
    last, there = slow.lines[-1], fast.first_at(0.8)
    assert f"is at .8 after {there['training_s']:.0f} s of training" in page
    assert f"{there['wall_s']:.0f} s from the command's start; the public loop is not after" in page
    assert f"is not after {last['training_s']:.0f} s and {last['wall_s']:.0f}" in page
    alone = first[0][0] - iterations_of(sorted(seeds["words-flow-grpo"], key=lambda curve: curve.seed)[0])[0]
    assert alone == pytest.approx(55 - 2.0, abs=0.6)
    assert 13 < last["training_s"] / fast.first_at(0.8)["training_s"] < 14


def test_held_rows_make_what_the_page_says() -> None:
    lines = [line for line in rows_in(MEASURED / "iteration_float8.jsonl") if line.get("model") == "sd3.5-medium"]
    for rows, said in (("looped over", "looped over"), ("rows held", "held")):
        for line in [line for line in lines if line.get("rows") == rows][-2:]:
            check_iteration(line, said)


def check_iteration(line: dict[str, Any], *version: str) -> list[str]:
    """That the page's row of the line's KL and this version has its numbers, without a difference of log-probs; the
    cells after the pictures a second."""
    kl = f"{line['kl']:g}".removeprefix("0") or "0"
    page, begin = (ROOT / "benchmarks" / "RESULTS.md").read_text(), " \\| ".join((kl, *version))
    (row,) = re.findall(rf"^\| {begin} \|(.*)\|$", page, re.MULTILINE)
    cells = [cell.strip(" *") for cell in row.split("|")]
    seconds = [f"{line[name]:.2f}".removeprefix("0") for name in ("rollout_s", "update_s", "sync_s")]
    assert cells[:4] == [*seconds, f"{line['images/s']:.2f}"]
    assert line["logprob_abs_diff/max"] == 0
    return cells[4:]


def test_fused_projections_and_larger_passes_make_what_the_page_says() -> None:
    lines = [line for line in rows_in(MEASURED / "iteration_float8.jsonl") if line.get("rows") == "sync on the device"]
    assert len(lines) == 5
    for line in lines:
        norm, peak = check_iteration(line, "fused" if "fused" in line["variant"] else "apart", str(line["batch"]))
        assert float(norm) == pytest.approx(line["grad_norm"], rel=1e-3)
        assert peak == f"{line['peak GiB']:.1f}"


FLOWS = {
    "qwen_image_flow_h200": {
        "1 GPU": (3, 4),
        "2 GPUs": (2, 3),
        "4 GPUs": (3, 4),
        "1 GPU of two H200s": (3, 4),
        "2 GPUs of two H200s": (3, 4),
        "4 GPUs of other four H200s": (3, 4),
        "1 GPU of one host": (3, 4, 5),
        "2 GPUs of one host": (3, 4, 5),
        "4 GPUs of one host": (3, 4, 5),
        "4 GPUs, all weights, once more": (3, 4, 5, 6, 7),
    },
    "sd35_four_h200": {"together, four GPUs": (3, 4), "two sample ahead, two train": (3, 4)},
}
"""Log -> its runs, and the iterations whose medians the page has."""


@pytest.mark.parametrize(("log", "run"), [(log, run) for log, runs in FLOWS.items() for run in runs])
def test_the_flows_on_several_gpus_are_in_their_logs(log: str, run: str) -> None:
    lines = rows_in(MEASURED / f"{log}.jsonl")
    steady = [line for line in lines if line["run"] == run and line["iteration"] in FLOWS[log][run]]
    pictures = f"{steady[0]['perf/total_num_images']:.0f}"
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
    found = next(line for line in page if line.startswith(f"| {run} | {pictures} |"))
    numbers = [float(cell.strip(" *").split(",")[0]) for cell in found.strip("|").split("|")[1:]]
    seconds = {name: median(line[f"timing_s/{name}"] for line in steady) for name in ("step", "gen", "update_actor")}
    assert numbers[-2:] == [round(seconds["step"], 1), round(float(pictures) / seconds["step"], 2)]
    for name in ("gen", "update_actor"):
        assert any(abs(number - seconds[name]) < 0.011 for number in numbers[1:-2]), name


@pytest.mark.parametrize(
    ("run", "again", "seeds"),
    [
        ("words", "words, ema.decay .98", [0, 1, 2]),  # an average that its ramp keeps from reaching either decay
        ("words, deviation of the group", "words, deviation of the group, read on the GPU", [0]),
    ],
)
def test_a_run_of_a_seed_on_another_gpu_is_the_same_again(run: str, again: str, seeds: Sequence[int]) -> None:
    curves = curves_of(read_lines([MEASURED / "words_h200.jsonl"]))
    assert [one.seed for one in curves[again]] == [*seeds]
    for first, second in zip(curves[run], curves[again], strict=False):
        assert first.seed == second.seed
        assert first.lines[-1]["iteration"] == 40
        for kind in ("reward", "read", "colours"):
            assert [line[kind] for line in first.lines] == [line[kind] for line in second.lines]


def test_the_page_says_what_the_recipe_read_at_its_end() -> None:
    page = (ROOT / "docs" / "words.md").read_text()
    ends = [
        next(f"{words.read(line):.3f}"[1:] for line in run.measured if line["iteration"] == 30)
        for run in curves_of(read_lines([MEASURED / "words_h200.jsonl"]))["words"]
    ]
    assert load_recipe("words").trainer.total_training_steps == 30
    assert "**`words` reads {}, {} and {} after its 30 iterations".format(*ends) in page


def test_sixteen_readers_make_what_the_page_says() -> None:
    page = " ".join((ROOT / "docs" / "words.md").read_text().split())
    kept = (MEASURED / "two_gpus_h200.txt").read_text().splitlines()
    curve = [json.loads(line) for line in kept if line.startswith('{"run": "words-flow-grpo"')]
    first = next(line for line in curve if line["held_out"] >= 0.7)
    rows = {cells[1].strip(): [cell.strip() for cell in cells] for line in kept if len(cells := line.split("|")) == 12}
    ours, theirs = rows["words-flow-grpo"], rows["public loop, our settings"]
    least_times = (float(theirs[5]) - 0.05) * 60 / first["training_s"]  # its minutes came back rounded
    assert least_times > 3
    said = f"first reads .7 after {first['training_s']:.1f} s here, its first iteration's compilation included, and"
    assert f"{said} after {theirs[5]} minutes there, {least_times:.1f} times" in page
    assert f"{theirs[9]} there, {ours[10]} and {theirs[10]} pictures a second" in page
    read = [float(found[1]) for line in kept if (found := re.match(r"iteration \d*[05]/.*held-out ([\d.]+)", line))]
    assert len(read) == 144 // 5 + 1
    assert f"no reading is below .7 from the {5 * (1 + max(n for n, r in enumerate(read) if r < 0.7))}th" in page
    assert f"{max(read):.3f}".removeprefix("0") + " is the most after 144 iterations" in page


def test_early_steps_make_what_the_pages_say() -> None:
    """Of the log of both loops; its readings are those of the same seed on another host, whose steps waited."""
    curves = curves_of(read_lines([MEASURED / "early_steps_h200.jsonl"]))
    (early,), (waiting,) = curves["words-flow-grpo"], curves["words-flow-grpo, steps that wait"]
    (public,) = curves["public loop, our settings"]
    firsts = [curve.first_at(0.7) for curve in (early, public)]
    ours, theirs = (line["training_s"] for line in firsts if line)
    seconds = [time_to_reward._iteration(curve) for curve in (early, waiting, public)]
    told = " ".join((ROOT / "docs" / "words.md").read_text().split())
    assert f"first reads .7 after {ours:.1f} s, of which {early.lines[1]['training_s']:.1f} are its first" in told
    assert f"the public loop after {theirs:.1f} s" in told
    assert f"(`trainer.early_steps`) it is {theirs / ours:.1f} times" in told
    assert f"An iteration takes {seconds[0]:.2f} s ({512 / seconds[0]:.0f} pictures a second" in told
    assert f"and {seconds[2]:.2f} ({512 / seconds[2]:.0f}), **{seconds[2] / seconds[0]:.1f} times**" in told
    assert (
        f"in the same call, {seconds[1]:.2f} (predicted .23 s less, measured .{100 * (seconds[1] - seconds[0]):.0f})"
        in told
    )
    held_out = {line["iteration"]: line["held_out"] for line in early.lines if line["held_out"] is not None}
    assert max(held_out.values()) == held_out[125] < 0.8
    before = curves_of(read_lines([MEASURED / "time_to_reward_seeds_h200.jsonl"]))["words-flow-grpo"]
    (other,) = [curve for curve in before if curve.lines[0]["seed"] == 1]
    for curve, count in ((other, 26), (waiting, 6)):
        found = {line["iteration"]: line["held_out"] for line in curve.lines if line["held_out"] is not None}
        assert len(found) == count
        assert found == {iteration: held_out[iteration] for iteration in found}
