# SPDX-License-Identifier: Apache-2.0
"""The page of a run and the page of two, as a browser draws them."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page

from flows.compare import render as render_both
from tasks.report.page import GRID_TITLES, render
from tasks.report.recorded import Recorded, read
from tests.pages.conftest import Shown
from tests.support.browser import browsing, contrasts, text_of
from tests.support.recorded_run import HOSTILE, in_memory

DESKTOP, TELEPHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SHOWN = "line => getComputedStyle(line).visibility"
READABLE = 4.5
"""Contrast of text with what is behind it, that WCAG 2 asks for."""


@pytest.fixture(scope="module")
def long(shown: Shown) -> Recorded:
    """A made-up run of 60 iterations with a guard, a missing reward and a hostile prompt, under another name."""
    recorded = in_memory(total=60, every=10, others=60)
    recorded.run.info._run_name = "a-name-of-a-run-without-a-place-to-break-it-" * 3
    _, samples = recorded.samples["held-out"]
    samples[0] = replace(samples[0], prompt=HOSTILE * 8)
    recorded.run.data.tags["doubleflow.reward_hacking"] = f"the reward rises while {'taste' * 30} falls"
    return recorded


@pytest.fixture(scope="module")
def pages(shown: Shown, long: Recorded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The real run's own page, the made-up run's, and the two side by side."""
    folder = tmp_path_factory.mktemp("pages")
    both = render_both(read(shown.history, GRID_TITLES), long)
    for name, content in (("long", render(long)), ("both", both)):
        (folder / f"{name}.html").write_text(content)
    return {"real": shown.report, "long": folder / "long.html", "both": folder / "both.html"}


class Watched:
    """A page that is opened from a file: what it asks for, and what it complains of."""

    def __init__(self, context: BrowserContext, file: Path):
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page = context.new_page()
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(file.as_uri())

    def check_alone(self) -> None:
        """Nothing but the file itself and what is in it was asked for, and nothing went wrong."""
        file, *others = self.asked
        assert file.startswith("file:")
        assert [address[:80] for address in others if not address.startswith("data:")] == []
        assert self.said == []


@pytest.fixture(scope="module")
def window() -> Iterator[BrowserContext]:
    """A browser that knows no server."""
    with browsing() as context:
        yield context


@pytest.fixture
def opens(window: BrowserContext, pages: dict[str, Path]) -> Iterator[Callable[..., Page]]:
    """Opens a page by its name; at the end each was self-contained and silent."""
    watched = []

    def open_page(name: str, size: dict[str, int] = DESKTOP, scheme: Any = "light") -> Page:
        watched.append(Watched(window, pages[name]))
        page = watched[-1].page
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=scheme)
        return page

    yield open_page
    for one in watched:
        one.check_alone()
        one.page.close()


def box(page: Page, selector: str) -> dict[str, float]:
    """Where the first one of these is."""
    found = page.locator(selector).first.bounding_box()
    assert found is not None, f"{selector} is not drawn"
    return found


def check_drawn(figure: Any) -> None:
    """Every line of a chart has its points, and it and its band have a colour that can be seen."""
    lines = json.loads(figure.get_attribute("data-chart"))["series"]
    drawn = figure.locator("polyline.line")
    assert drawn.count() == len(lines) > 0
    for number, line in enumerate(lines):
        assert len(drawn.nth(number).get_attribute("points").split()) == len(line["points"])
        assert drawn.nth(number).evaluate("line => getComputedStyle(line).stroke") not in ("none", "rgb(0, 0, 0)")
    for band in figure.locator("polygon.band").all():
        assert band.bounding_box()["width"] > 2  # it has no height where all prompts score alike
        assert band.evaluate("band => getComputedStyle(band).fill") not in ("none", "rgb(0, 0, 0)")


@pytest.mark.parametrize("name", ["real", "long"])
def test_curves_have_bands_and_tell_their_values_under_the_pointer(opens: Callable[..., Page], name: str) -> None:
    page = opens(name)
    figures = page.locator("figure.chart")
    for figure in figures.all():
        check_drawn(figure)
    hero = figures.first
    bands = hero.locator("polygon.band").all()
    assert len(bands) == 2, "of held-out and training, over prompts"
    assert all(band.bounding_box()["height"] > 2 for band in bands)
    told = hero.locator("output")
    before = told.inner_text()
    assert re.search(r"held-out [\d.,-]+ · training [\d.,-]+", before)
    hero.locator("svg").hover()
    assert re.search(r"iteration \d+: held-out \S+ \[\S+, \S+\].* · training \S+ \[\S+, \S+\]", told.inner_text())
    cursor = hero.locator(".cursor")  # a line upright: without width it is never "visible" to Playwright
    assert cursor.evaluate(SHOWN) == "visible"
    page.locator("h1").hover()
    assert told.inner_text() == before
    assert cursor.evaluate(SHOWN) == "hidden"


@pytest.mark.parametrize("name", ["real", "long", "both"])
def test_the_slider_changes_the_pictures(opens: Callable[..., Page], name: str) -> None:
    page = opens(name)
    viewer = page.locator(".viewer").first
    steps = viewer.get_attribute("data-steps").split()
    shown = viewer.locator(".frame:visible img")
    last = [image.get_attribute("src") for image in shown.all()]
    assert viewer.locator("label output").inner_text() == steps[-1]
    viewer.locator("input").press("Home")
    assert viewer.locator("label output").inner_text() == steps[0] == "0"
    first = [image.get_attribute("src") for image in shown.all()]
    assert len(first) == len(last) == (2 if name == "both" else 1)
    if name != "long":  # whose grids are all the same
        assert first[0] != last[0]
    for image in shown.all():
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
        assert "iteration 0" in image.get_attribute("alt")


def test_samples_show_their_prompt_rewards_and_noise_key(opens: Callable[..., Page]) -> None:
    page = opens("real")
    for kind in ("Held-out pictures", "Training pictures"):
        assert page.locator("h3", has_text=kind).is_visible()
    cards = page.locator(".card")
    assert cards.count() >= 8, "best and worst, held out and in training"
    for card in cards.all():
        assert card.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
        text = " ".join(card.inner_text().split())
        assert re.search(r"reward -?\d+(\.\d+)? jpeg_incompressibility -?\d", text), text
        assert re.search(r"the number \d{3} noise: seed \d, iteration -?\d+, uid \w+, sample_index \d", text), text


def test_what_was_watched_spent_changed_and_read_is_told(opens: Callable[..., Page], shown: Shown) -> None:
    page = opens("real")
    text = text_of(page)
    assert re.search(
        r"flagged diversity [\d.]+ [\d.]+ missing not measured no edge_density [\d.]+ [\d.]+ \S+ \S+ no", text
    )
    assert re.search(r"iterations 2 held-out reward [\d.]+ held-out reward gained [+-][\d.]+ hours [\d.]+", text)
    for stage in ("gen", "reward", "update_actor", "update_weights", "testing", "orchestration"):
        assert page.locator("td", has_text=re.compile(f"^{stage}$")).is_visible(), stage
    stages = [part.bounding_box()["width"] for part in page.locator(".stack i").all()]
    assert sum(stages) <= box(page, ".stack")["width"] + 1
    assert re.search(
        r"Changed of the recipe: field recipe this run trainer.seed \d 1 trainer.total_training_steps 3 2", text
    )
    for name, said in (
        ("MLflow run", shown.run_id),
        ("commit", shown.tags["mlflow.source.git.commit"]),
        ("config digest", shown.tags["doubleflow.config_digest"]),
        ("data digest", shown.tags["doubleflow.data_digest"]),
    ):
        assert f"{name} {said}" in text
    assert "actor_rollout_ref.model.path" not in text, "what nobody asks for is folded away"
    page.get_by_text("fields that somebody chose").click()
    assert "actor_rollout_ref.model.path" in text_of(page)
    guarded = text_of(opens("long"))
    assert "jpeg_compressibility -2.997 -2.800 -0.4000 0.25 since iteration 9" in guarded
    assert "This may be reward hacking: the reward rises while" in guarded
    assert "Without a reward" in guarded


def test_a_metric_is_found_by_a_part_of_its_name(opens: Callable[..., Page]) -> None:
    page = opens("real")
    page.locator("summary", has_text="metrics").click()
    rows = page.locator("#traces tr[data-name]:visible")
    everything = rows.count()
    page.get_by_placeholder("part of a name").fill("timing_s/")
    assert 5 < rows.count() < everything
    assert all(row.inner_text().startswith("timing_s/") for row in rows.all())


@pytest.mark.parametrize("size", [DESKTOP, TELEPHONE], ids=["desktop", "telephone"])
@pytest.mark.parametrize("name", ["real", "long", "both"])
def test_nothing_is_cut_off_or_broken_letter_by_letter(opens: Callable[..., Page], name: str, size: dict) -> None:
    page = opens(name, size)
    for folded in page.locator("details").all():
        folded.evaluate("part => part.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], "nobody scrolls sideways"
    # Words of a table stand in one line: a cell that holds one word is no taller than two lines.
    tall = page.evaluate(
        """[...document.querySelectorAll("th, td")].filter(cell => /^[\\w ()]{3,20}$/.test(cell.innerText.trim())
          && cell.getBoundingClientRect().width > 0 && cell.getBoundingClientRect().width < 40
          && cell.getBoundingClientRect().height > 60).map(cell => cell.innerText)"""
    )
    assert tall == []
    first, second = (found.bounding_box() for found in page.locator(".first > div, .columns > div").all()[:2])
    side_by_side = abs(first["y"] - second["y"]) < 2 and second["x"] >= first["x"] + first["width"]
    assert side_by_side == (size == DESKTOP)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["real", "long", "both"])
def test_text_can_be_read_in_light_and_dark(opens: Callable[..., Page], name: str, scheme: str) -> None:
    page = opens(name, scheme=scheme)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")
    found = contrasts(page)
    assert len(found) > 100
    assert {text: ratio for text, ratio in found.items() if ratio < READABLE} == {}


def test_two_runs_stand_side_by_side_and_have_the_parts_of_one(opens: Callable[..., Page], shown: Shown) -> None:
    page = opens("both")
    left, right = (found.bounding_box() for found in page.locator(".viewer").first.locator(".columns > div").all())
    assert left["y"] == right["y"]
    assert left["width"] == pytest.approx(right["width"], abs=1)
    for figure in page.locator("figure.chart").all():
        check_drawn(figure)
    names = page.locator("figure.chart").first.locator(".legend span").all_inner_texts()
    assert names[0] == shown.name
    assert len(names) == 2
    assert {"held-out reward", "training reward"} <= {
        title.split(" (")[0] for title in page.locator("figcaption b").all_inner_texts()
    }
    text = text_of(page)
    for said in ("Difference", "Cost", "Worst held-out pictures", "trainer.total_training_steps", shown.run_id):
        assert said in text
    assert page.locator(".card").count() >= 4
