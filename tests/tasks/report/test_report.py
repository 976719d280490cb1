# SPDX-License-Identifier: Apache-2.0
"""A run's page: it needs nothing from elsewhere, runs nothing that a prompt says, and hides no missing reward."""

import json
import logging
import re
import subprocess
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from flows.compare import card, paired
from flows.compare import render as render_both
from flows.report import report
from tasks.config.tracking import TrackingConfig
from tasks.records.history import RunHistory
from tasks.records.owner import OWNER, Owner
from tasks.records.tracking import Tracker
from tasks.report.charts import Series, line_chart, number, spread, thinned, ticks
from tasks.report.page import render
from tasks.report.recorded import FRAMES, Recorded, by_prompt, read
from tasks.report.samples import extremes
from tasks.report.sections import HELD_OUT, cost, duration, lineage, pace, reward_charts, where_time_went
from tasks.report.thumbnails import SAMPLE_BYTES, of_sample, thumbnail
from tasks.run import reporting
from tasks.run.measuring import Verdict, metrics
from tasks.run.reporting import RunReport
from tasks.stages.validation import Validation
from tasks.system.processes import ProcessIdentity
from tests.support.mlflow_store import mlflow_in
from tests.support.recorded_run import HOSTILE, STAGES, config_of, in_memory, in_mlflow, metrics_of, table_of

MOST_BYTES = 5 * 2**20
"""Of a run of 1,000 iterations, as docs/platform.md says."""
PICTURE = np.full((8, 16, 3), 90, np.uint8)
LOADING = {"src", "srcset", "poster", "data", "action", "background", "xlink:href"}


class Page(HTMLParser):
    """A page's elements, its text, and what is said in its scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.code: list[str] = []
        self._in_code = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._in_code = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._in_code = False

    def handle_data(self, data: str) -> None:
        (self.code if self._in_code else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        return [
            a for t, a in self.elements if t == tag and all(a.get(n.strip("_")) == v for n, v in attributes.items())
        ]


def check_self_contained(page: Page) -> None:
    """Nothing is loaded: no link, frame or import, and every picture is in the page."""
    assert not {tag for tag, _ in page.elements} & {"link", "iframe", "object", "embed", "base", "form", "video"}
    for tag, attributes in page.elements:
        for name in LOADING & attributes.keys():
            assert attributes[name].startswith("data:image/webp;base64,"), (tag, name, attributes[name][:60])
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert "url(" not in attributes.get("style", "")
    code = "".join(page.code)
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|import\(", code)
    assert len(page.all("script")) == 1, "the page's own"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def history(folder: Path) -> RunHistory:
    """A run of twelve iterations in a real MLflow store; one of its four prompts is hostile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        settings = TrackingConfig(uri=mlflow_in(folder), artifacts=(folder / "artifacts").as_uri())
        tracker = Tracker(settings, "quickstart-1")
    in_mlflow(tracker, 12, 4, ["the number 1", "the number 2", "the number 3", HOSTILE])
    return RunHistory(tracker.client, tracker.run_id)


def test_the_page_of_a_run_whose_process_is_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, it could tell nobody: MLflow calls it running for good, with so many minutes left."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = Tracker(TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri()), "killed")
    in_mlflow(tracker, 3, 2, ["the number 1", "the number 2"])
    tracker.client.set_terminated(tracker.run_id, "RUNNING")
    history = RunHistory(tracker.client, tracker.run_id)
    assert "killed running" in Page(report(history, None, tmp_path).read_text()).text
    with subprocess.Popen(["true"]) as process:
        owner = Owner.this()._replace(process=ProcessIdentity.of(process.pid))
    tracker.client.set_tag(tracker.run_id, OWNER, str(owner))
    path = report(RunHistory(tracker.client, tracker.run_id), None, tmp_path)
    assert path.parent == tmp_path
    assert "ended without a word" in Page(path.read_text()).text
    assert "min left" not in path.read_text()


@pytest.fixture(scope="module")
def recorded(history: RunHistory, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    temporary = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        found = read(history, ("validation", "samples"))
    assert not list(temporary.iterdir()), "every page would leave its tables and pictures there"
    return found


def test_the_page_of_a_recorded_run_is_written_here_and_in_mlflow(history: RunHistory, folder: Path) -> None:
    path = report(history, folder)
    html = path.read_text()
    assert path == folder / "report.html"
    assert history.content("report.html").decode() == html
    page = Page(html)
    check_self_contained(page)
    assert "quickstart-1 finished" in page.text
    assert "iteration 12 of 12" in page.text
    assert "This may be reward hacking: the reward rises while taste falls" in page.text
    assert [f["data-step"] for f in page.all("div", class_="frame")] == ["0", "4", "8", "12"]
    assert ["hidden" in f for f in page.all("div", class_="frame")] == [True, True, True, False], "without a script too"
    for said in ("c0ffee", "torch", "data.prompts", "update_actor", "since iteration 9", "GPU-hours"):
        assert said in page.text, said
    (slider,) = page.all("input", type="range")
    assert (slider["max"], slider["value"]) == ("3", "3")
    charts = [json.loads(figure["data-chart"]) for figure in page.all("figure")]
    held_out = charts[0]["series"][0]
    assert held_out["name"] == "held-out"
    assert [point[0] for point in held_out["points"]] == [0, 4, 8, 12]
    assert all(re.fullmatch(r"\[0\.\d+, \d\.\d+\]", point[2]) for point in held_out["points"]), "over prompts"


def test_the_stages_are_those_whose_seconds_add_up(recorded: Recorded) -> None:
    """What was done behind the run, or within a stage, is no stage of its own."""
    rows = where_time_went(recorded)
    assert {row["stage"] for row in rows} == {*STAGES, "orchestration"}
    assert sum(row["share"] for row in rows) == pytest.approx(100, abs=5)


def test_the_environment_is_that_of_the_newest_start(history: RunHistory, recorded: Recorded) -> None:
    again = recorded.environment | {"python": "3.11.9"}
    history.client.log_dict(history.run_id, again, "lineage/000004/environment.json")
    assert recorded.environment["python"] != again["python"]
    assert read(history, ()).environment == again
    for nth in (2, 10):
        last = again | {"python": f"3.11.{nth}"}
        history.client.log_dict(history.run_id, last, f"lineage/000004-{nth}/environment.json")
        assert read(history, ()).environment == last, nth


def test_each_start_has_a_row_in_the_order_of_the_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = Tracker(TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri()), "starts")
    for name in ("000011", "000004-10", "000004-2", "000004", "not-a-start"):
        tracker.tag(f"doubleflow.lineage.{name}", f"commit of {name}")
    rows = lineage(Recorded(tracker.client.get_run(tracker.run_id), {}, {}))
    assert [row for row in rows if row[0].startswith("start")] == [
        ("start after iteration 4", "commit of 000004"),
        ("start 2 after iteration 4", "commit of 000004-2"),
        ("start 10 after iteration 4", "commit of 000004-10"),
        ("start after iteration 11", "commit of 000011"),
    ]


def test_a_recent_iteration_is_one_of_the_last(recorded: Recorded) -> None:
    """A run that has become quicker; MLflow gives its metrics from the newest step on."""
    seconds = {step: 9.0 if step <= 40 else 2.0 for step in range(60, 0, -1)}
    quicker = replace(recorded, metrics=recorded.metrics | {"timing_s/step": seconds, "timing_s/gen": seconds})
    (row,) = [row for row in where_time_went(quicker) if row["stage"] == "gen"]
    assert (row["times"], row["recent"], pace(quicker)) == (60, "2 s", 2.0)


def test_a_hostile_prompt_is_text_on_both_pages(recorded: Recorded) -> None:
    other = replace(recorded, config=recorded.config | {"data": {"prompts": HOSTILE}})
    for html in (render(recorded, reason=HOSTILE, ended="FAILED"), render_both(recorded, other)):
        page = Page(html)
        check_self_contained(page)
        assert HOSTILE in page.text
        assert "<script>alert" not in html


def test_what_is_missing_is_called_missing_and_is_no_zero(recorded: Recorded) -> None:
    step, samples = recorded.samples["held-out"]
    (without,) = [sample for sample in samples if sample.end == "missing"]
    assert without.rewards["reward"] is None
    assert step == 12
    assert not [s for s in samples if s.end != "missing" and s.rewards["reward"] is None], "it is not ranked"
    page = Page(render(recorded))
    assert "Without a reward" in page.text
    assert page.text.count("missing") > sum(None in sample.rewards.values() for sample in samples)
    assert "Rewards were missing: reward/ocr/missing 1" in page.text
    assert "nan" not in page.text.lower().split()
    assert number(float("nan")) == "missing"


@pytest.mark.parametrize("points", [{}, {3: 0.5}])
def test_what_no_two_validations_measured_is_not_said_to_have_gained_nothing(
    recorded: Recorded, points: dict[int, float]
) -> None:
    """An offline run validates nothing at all."""
    gains = cost(replace(recorded, metrics=recorded.metrics | {HELD_OUT: points}))
    assert {value for name, value in gains.items() if "gained" in name} == {"not measured"}
    gains = cost(replace(recorded, metrics=recorded.metrics | {HELD_OUT: {0: 0.5, 3: 0.5}}))
    assert {value for name, value in gains.items() if "each unit" in name} == {"no gain"}


def test_a_guard_that_no_validation_flags_any_more_is_not_called_flagged(recorded: Recorded) -> None:
    flags = {0: 0.0, 4: 1.0, 8: 0.0}
    calm = replace(recorded, metrics=recorded.metrics | {"guard/jpeg_compressibility/flag": flags})
    assert "no more, first at iteration 4" in Page(render(calm)).text
    assert "since iteration" not in Page(render(calm)).text


def test_the_best_and_the_worst_are_named_by_their_noise(recorded: Recorded) -> None:
    _, samples = recorded.samples["held-out"]
    best = [s.rewards["reward"] for s in samples if s.end == "best"]
    worst = [s.rewards["reward"] for s in samples if s.end == "worst"]
    assert best == sorted(best, reverse=True)
    assert worst == sorted(worst)
    assert min(best) >= max(worst)
    table = recorded.held_out[12]
    key = samples[0].noise_key
    assert (key["seed"], key["iteration"]) == (0, -1)
    row = table[(table["uid"] == key["uid"]) & (table["sample_index"] == key["sample_index"])]
    assert row["reward"].item() == best[0] == table["reward"].max()
    assert samples[0].prompt == row["prompt"].item()
    step, trained = recorded.samples["training"]
    assert {s.noise_key["iteration"] for s in trained} == {step}


def test_two_runs_stand_side_by_side(recorded: Recorded) -> None:
    other = in_memory(total=8, every=4)
    page = Page(render_both(recorded, other))
    viewer = page.all("div", class_="viewer")[0]
    assert (viewer["data-steps"], viewer["style"]) == ("0 4 8 12", "--n: 2")
    assert "trainer.total_training_steps" in page.text
    assert "actor_rollout_ref.rollout.n " not in page.text, "what is equal is left out"
    legends = [series["name"] for series in json.loads(page.all("figure")[0]["data-chart"])["series"]]
    assert legends == [recorded.name, other.name]
    assert [label for label, _ in paired(other, other)] == ["reward (ocr)", "jpeg_compressibility (guard)"]
    assert card(recorded, other, "http://mlflow/#/page").endswith("\n\n[the page of both](http://mlflow/#/page)")
    elsewhere = {step: table.assign(uid=table["uid"] + "-of-others") for step, table in other.held_out.items()}
    assert "not measured alike" not in page.text
    functions = other.config["reward"]["functions"]
    heavier = {"functions": functions | {"ocr": functions["ocr"] | {"weight": 2.0}}}
    twice = replace(other, config=other.config | {"reward": other.config["reward"] | heavier})
    assert (
        "not measured alike, which these differences have in them, too: reward.functions.ocr.weight."
        in Page(render_both(other, twice)).text
    )
    assert [label for label, _ in paired(other, twice)] == ["reward", "ocr", "jpeg_compressibility (guard)"]
    assert "no held-out pictures in common" in Page(render_both(other, replace(other, held_out=elsewhere))).text


def test_a_reward_is_compared_with_itself() -> None:
    """One run trains OCR alone and the other its sum with compressibility, so that the trained rewards are two."""
    alone = in_memory(total=8, every=4)
    functions = alone.config["reward"]["functions"]
    both = functions | {"jpeg_compressibility": functions["jpeg_compressibility"] | {"guard": False, "weight": 1.0}}
    better = {
        step: table.assign(**{"reward": table["reward"] + 0.4, "reward/ocr": table["reward/ocr"] - 0.1})
        for step, table in alone.held_out.items()
    }
    config = alone.config | {"reward": alone.config["reward"] | {"functions": both}}
    summed = replace(alone, config=config, held_out=better)
    for one, other, sign in ((summed, alone, 1), (alone, summed, -1)):
        found = dict(paired(one, other))
        assert [*found] == ["reward", "ocr", "jpeg_compressibility"]
        assert found["reward"].mean == pytest.approx(0.4 * sign)
        assert found["ocr"].mean == pytest.approx(-0.1 * sign)
        drawn = {chart.title: chart for chart in reward_charts((one, other))}
        assert "held-out reward" in drawn
        assert len(drawn["held-out ocr"].legend) == 2


@pytest.mark.slow
def test_a_run_of_a_thousand_iterations_has_a_page_that_opens() -> None:
    """Pictures of 512 x 512 that compress as badly as can be, a validation every ten iterations, 110 metrics."""
    html = render(in_memory(total=1000, every=10, others=90, size=(512, 512)))
    assert len(html.encode()) < MOST_BYTES
    page = Page(html)
    steps = [int(f["data-step"]) for f in page.all("div", class_="frame")]
    assert len(steps) <= FRAMES + 4
    assert (steps[0], steps[-1]) == (0, 1000)
    assert html.count("<polyline") > 100


def test_runs_without_validation_pictures_or_iterations_have_a_page_too() -> None:
    recorded = in_memory(total=3, every=1)
    recorded.grids, recorded.samples, recorded.held_out, recorded.overrides = {}, {}, {}, None
    recorded.metrics = {n: p for n, p in recorded.metrics.items() if not n.startswith("val/")}
    assert "No held-out pictures are there" in Page(render(recorded)).text
    recorded.metrics, recorded.sampled = {}, {}
    text = Page(render(recorded)).text
    assert "No iteration is recorded yet" in text
    assert "was not recorded" in text


@pytest.fixture
def running(tmp_path: Path, history: RunHistory, monkeypatch: pytest.MonkeyPatch) -> RunReport:
    """The page of a process that continues a run at iteration 13, one held-out grid in its folder."""
    monkeypatch.setattr(reporting, "page_logger", lambda: logging.getLogger("flow run"))  # there is no flow here
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = config_of(20, tracking={"uri": history.client.tracking_uri})
    config = recipe.with_changes({"trainer": {"seed": 7, "default_local_dir": str(tmp_path)}})
    (config.run_dir / "validation").mkdir(parents=True)
    Image.new("RGB", (64, 32)).save(config.run_dir / "validation" / "000013.png")
    return RunReport(config, Tracker(config.tracking, "quickstart-1", history.run_id), recipe)


def show(report: RunReport) -> None:
    """Iteration 13, which was validated."""
    rng = np.random.default_rng(1)
    prompts = ["the number 1", "the number 2"]
    report.log_changes()
    report.add(13, metrics_of(13, 20, rng))
    report.add_samples(13, table_of(prompts, 2, 0.5, rng).assign(seed=7, iteration=13), [PICTURE] * 3)
    report.add_validation(13, Validation(table_of(prompts, 2, 0.5, rng), np.stack([PICTURE] * 4), ("ocr",)))
    report.write()


def test_a_run_that_goes_on_shows_what_was_before_it(running: RunReport, history: RunHistory) -> None:
    show(running)
    page = Page(running.path.read_text())
    check_self_contained(page)
    assert "quickstart-1 running" in page.text
    assert "iteration 13 of 20" in page.text
    lines = json.loads(page.all("figure")[0]["data-chart"])["series"]
    assert [point[0] for point in lines[1]["points"]] == list(range(1, 14))
    assert [frame["data-step"] for frame in page.all("div", class_="frame")] == ["13"], "of the grids that are here"
    assert "Held-out pictures, iteration 13" in page.text
    assert history.content("report.html").decode() == running.path.read_text()
    assert json.loads(history.content("overrides.json"))["trainer.seed"] == ["0", "7"]
    assert len(json.loads(history.content("extremes/000013.json"))["samples"]) == 4
    assert running.metrics() == {}
    with pytest.raises(ValueError, match="out of paper"), running.concluded():
        raise ValueError("the printer is\nout of paper")
    page = Page(running.path.read_text())
    assert "quickstart-1 failed" in page.text
    assert "It failed: the printer is out of paper" in page.text
    assert history.content("report.html").decode() == running.path.read_text()


def test_a_step_that_a_kill_came_into_is_not_on_the_page(folder: Path, running: RunReport, history: RunHistory) -> None:
    """Its files are there before its metrics, and a file may be half there."""
    album = folder / "half" / "000013"
    album.mkdir(parents=True)
    history.client.log_artifact(history.run_id, str(album), "pictures")
    tables = {"samples": pd.DataFrame({"uid": ["uid0"], "reward": [0.5], "image": ["pictures/000013/0000.png"]})}
    running.tracker.log_files(13, tables=tables)
    found = read(history)
    assert max(found.sampled) == max(found.grids["validation"]) == 12
    assert found.samples["training"][0] == 12


def test_a_page_that_cannot_be_made_is_told_counted_and_fails_nothing(
    running: RunReport, caplog: pytest.LogCaptureFixture
) -> None:
    (running.config.run_dir / "validation" / "000005.png").write_text("no picture")
    show(running)
    assert running.metrics() == {"report/failures": 1.0}
    assert not running.path.exists()
    (said,) = [record.getMessage() for record in caplog.records if "page could not be made" in record.getMessage()]
    assert "UnidentifiedImageError" in said
    assert f"python -m flows.report {running.tracker.run_id}" in said
    with pytest.raises(KeyboardInterrupt), running.concluded():
        raise KeyboardInterrupt
    (running.config.run_dir / "validation" / "000005.png").unlink()
    running.write()
    assert "iteration 13 of 20" in Page(running.path.read_text()).text, "nothing that was taken in is lost"


def test_more_steps_leave_chosen_ones_chosen() -> None:
    """So what was drawn of a step is not drawn again."""
    before: set[int] = set()
    for count in range(1, 300):
        chosen = spread(range(0, count * 10, 10), 24)
        assert len(chosen) <= 26
        assert chosen[0] == 0
        assert chosen[-1] == (count - 1) * 10
        assert set(chosen[:-1]) <= before | {chosen[-1], (count - 2) * 10} or count < 3
        before |= set(chosen)
    assert spread([0, 970, 980, 990], 24, range(0, 1000, 10)) == [0, 970, 980, 990], "of what retention left"


def test_a_long_line_is_drawn_by_means_and_their_range() -> None:
    points = {step: float(step % 2) for step in range(1, 641)} | {641: float("nan")}
    means, ranges = thinned(points, 160)
    assert len(means) == 160
    assert set(means.values()) == {0.5}
    assert set(ranges.values()) == {(0.0, 1.0)}
    assert thinned({1: 2.0}, 160) == ({1: 2.0}, {})
    assert line_chart("none", [Series("a", {1: float("nan")})]) is None
    assert "nan" not in str(line_chart("flat", [Series("a", {1: 0.0, 2: 0.0})]))


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.53, 0.94) == pytest.approx([0.6, 0.8])
    assert ticks(-3, -2.5) == pytest.approx([-3, -2.8, -2.6])
    assert ticks(1, 1) == [1]


def test_pictures_fit_their_bytes() -> None:
    rng = np.random.default_rng(0)
    worst = Image.fromarray(rng.integers(0, 256, (1024, 1024, 3), dtype=np.uint8))
    for limit in (SAMPLE_BYTES, 2000, 300):
        assert len(thumbnail(worst, limit, 1200)) <= 4 * limit / 3 + 40
    assert of_sample(Image.new("RGB", (4, 4))).startswith("data:image/webp;base64,")


def test_few_samples_are_at_one_end_each() -> None:
    table = pd.DataFrame({"prompt": ["a", "b", "c"], "reward": [0.1, 0.3, np.nan], "uid": ["a", "b", "c"]})
    shown = extremes(table, lambda row: Image.new("RGB", (8, 8)))
    assert [(sample.end, sample.prompt) for sample in shown] == [("best", "b"), ("worst", "a"), ("missing", "c")]


def test_the_texts_of_a_reward_that_is_called_reward_are_no_scores() -> None:
    """`flows.migrate` calls a script's own reward so: a page could not be made of it, nor could two be compared."""
    said = {"reward/reward": [0.1, 0.3, 0.5], "reward/text": ["x", None, "z"]}
    table = pd.DataFrame({"uid": ["a", "a", "b"], "prompt": ["a", "a", "b"], "reward": said["reward/reward"], **said})
    assert list(by_prompt(table)) == ["uid", "reward", "reward/reward"]
    best, *_ = extremes(table, lambda row: Image.new("RGB", (8, 8)))
    assert best.rewards == {"reward": 0.5, "reward/reward": 0.5}
    assert best.details == {"reward/text": "z"}
    measured = table.assign(set="test", steps=8, guidance=0.0)
    means = metrics(measured, Verdict(None, None), None)
    assert means["val/test/steps_8/reward/reward/mean"] == means["val/reward/mean"] == pytest.approx(0.3)


@pytest.mark.parametrize(("seconds", "said"), [(89, "89 s"), (90, "1.5 min"), (5400, "1.5 h"), (5688000, "1,580 h")])
def test_a_duration_as_a_person_says_it(seconds: float, said: str) -> None:
    assert duration(seconds) == said
