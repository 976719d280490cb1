# SPDX-License-Identifier: Apache-2.0
"""MLflow's pages of a run, as a browser shows them that was never there before."""

import re

from playwright.sync_api import BrowserContext

from tasks.records.headline import runs_page
from tests.pages.conftest import Shown
from tests.support.browser import WINDOW, opened, text_of, wait_for_text


def test_the_first_visit_shows_runs_with_reward_and_cost(shown: Shown, browser: BrowserContext) -> None:
    """From the server's bare address: the experiment is of trained models, and nothing has to be closed first."""
    page = opened(browser, shown.mlflow.address, "doubleflow")
    page.get_by_role("link", name="doubleflow", exact=True).first.click()
    for column in ("reward", "held_out", "images_per_second", "gpu_hours"):
        wait_for_text(page, f"1_headline/{column}")
    wait_for_text(page, shown.name)
    text = text_of(page)
    assert "workflowType=machine_learning" in page.url
    assert "Detect Issues" not in text
    assert "Ask questions about your" not in text, "the assistant does not open by itself"
    header = page.get_by_role("columnheader", name="1_headline/gpu_hours").first.bounding_box()
    assert header["x"] + header["width"] <= WINDOW["width"], "at first sight, without scrolling"
    longest = page.get_by_text("1_headline/images_per_second", exact=True).first
    assert longest.evaluate("name => name.scrollWidth <= name.clientWidth"), "its name is not cut off"
    numbers = re.findall(r"\d+\.\d+", text.partition("1_headline/hours")[2])
    assert len(numbers) >= 4
    assert all(len(number.lstrip("0.").replace(".", "")) <= 4 for number in numbers), "rounded for reading"


def test_the_saved_view_has_the_same_columns(shown: Shown, browser: BrowserContext) -> None:
    """On any server, for its link holds the choice."""
    page = opened(browser, shown.mlflow.address + runs_page(shown.experiment), "1_headline/reward", "Reward and cost")
    wait_for_text(page, shown.name)


def test_the_first_charts_are_reward_and_pictures(shown: Shown, browser: BrowserContext) -> None:
    page = opened(browser, f"{shown.page}/model-metrics", "1_headline")
    cards = page.locator("[data-testid='experiment-view-compare-runs-card'], [data-testid='run-chart-card']")
    for title in ("held_out", "reward", "1_headline/validation"):
        place = page.get_by_text(title, exact=True).first.bounding_box()
        assert place["y"] < WINDOW["height"] / 2, f"{title} is in the first row ({cards.count()} cards)"
    picture = page.locator("img[src*='validation'], img[src*='get-artifact'], img[src^='blob:']").first
    picture.wait_for()
    box = picture.bounding_box()
    assert min(box["width"], box["height"]) > 30
    assert box["y"] + box["height"] < WINDOW["height"], "seen without scrolling"
    assert page.evaluate("image => image.naturalWidth", picture.element_handle()) > 0
    assert "actor_rollout_ref.model.path" not in text_of(page), "no parameters push it out"


def test_the_overview_tells_what_was_learnt_and_where_it_came_from(shown: Shown, browser: BrowserContext) -> None:
    page = opened(browser, shown.page, "Learnt:", "Cost:", "Weights:", "train.py")
    assert shown.tags["mlflow.source.git.commit"][:7] in text_of(page)
    flow_run = page.get_by_role("link", name="Prefect's flow run")
    assert flow_run.get_attribute("href") == shown.tags["doubleflow.prefect_flow_run"]
    picture = page.get_by_role("link", name="before and after").get_attribute("href")
    assert f"{shown.run_id}/artifacts/before_after.png" in picture


def test_the_link_to_the_report_opens_it_as_it_is(shown: Shown, browser: BrowserContext) -> None:
    page = opened(browser, shown.page, "Learnt:")
    with browser.expect_page() as new:
        page.get_by_role("link", name="report", exact=True).click(timeout=60_000)  # nothing of MLflow's lies over it
    report = new.value.frame_locator("iframe")
    report.locator("h1", has_text=shown.name).wait_for()
    assert report.locator("figure.chart").first.locator("polygon.band").count() == 2
    viewer = report.locator(".viewer")
    assert viewer.locator("label output").inner_text() == "2"
    viewer.locator("input").press("Home")
    assert viewer.locator("label output").inner_text() == "0", "its script runs"


def test_a_registered_version_tells_its_reward_and_how_it_is_loaded(shown: Shown, browser: BrowserContext) -> None:
    page = opened(browser, f"{shown.mlflow.address}/#/models/tiny/versions/1", "Held-out reward", "from_pretrained")
    assert "doubleflow.held_out_reward" in text_of(page)
