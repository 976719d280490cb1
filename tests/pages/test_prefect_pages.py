# SPDX-License-Identifier: Apache-2.0
"""Prefect's pages of a run, and the form that starts one."""

import re

from playwright.sync_api import BrowserContext, Locator, Page

from tasks.config.common import CommonSettings
from tests.pages.conftest import Shown
from tests.support.browser import opened, text_of, wait_for_text
from tests.support.patience import post

FIELD = ".schema-form-property"


def test_the_link_in_mlflow_opens_the_flow_run(shown: Shown, browser: BrowserContext) -> None:
    """Its log has a line an iteration, and its task runs are named by what they did in which iteration."""
    page = opened(browser, shown.tags["doubleflow.prefect_flow_run"], "Completed", "iteration 2/2: reward")
    wait_for_text(page, "weights runs/tiny-")
    assert "This run didn't generate logs" not in text_of(page)
    page.locator(".p-tab", has_text="Task Runs").click()
    for task in ("rollout 1", "update 1", "rollout 2", "validate 2"):
        wait_for_text(page, task)


def test_the_progress_artifact_shows_curve_pictures_and_links(shown: Shown, browser: BrowserContext) -> None:
    flow_run = shown.tags["doubleflow.prefect_flow_run"].rpartition("/")[2]
    body = {"flow_runs": {"id": {"any_": [flow_run]}}, "artifacts": {"key": {"any_": ["training"]}}}
    (progress,) = post(f"{shown.prefect}/api/artifacts/filter", body)
    page = opened(browser, f"{shown.prefect}/artifacts/artifact/{progress['id']}", "held-out pictures, iteration 2")
    chart, grid = page.locator("img[src^='data:image/']").all()
    for picture, kind in ((chart, "svg+xml"), (grid, "webp")):
        assert picture.get_attribute("src").startswith(f"data:image/{kind};base64,")
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 400, kind
        assert picture.bounding_box()["width"] > 400
    assert len(progress["description"]) < 300_000, "it is sent anew at each update"
    end = r"held-out [\d.]+ -> [\d.]+ after 2 iterations; weights \S+, models:/tiny/1 held-out pictures"
    assert re.search(end, text_of(page)), "addresses stand below, as links"
    for name in ("MLflow", "report"):
        assert shown.run_id in page.get_by_role("link", name=name, exact=True).get_attribute("href")


def field(page: Page, title: str) -> Locator:
    """The first field of this title that is no section."""
    label = page.locator("label", has_text=re.compile(rf"^{title} \(Optional\)$"))
    return page.locator(f"{FIELD}:not({FIELD}-any-of-input)", has=label).first


def test_the_form_begins_with_the_ten_fields_that_people_change_first(deployment: str, browser: BrowserContext) -> None:
    page = opened(browser, f"{deployment}/run", "Total Training Steps", "Trainer ranks a machine")
    shown = [text.removesuffix(" (Optional)") for text in page.locator("label.p-label__label").all_inner_texts()]
    ten = [name.replace("_", " ").title() for name in CommonSettings.model_fields]
    assert len(ten) == 10
    assert shown[:13] == ["Run Name", "common", *ten, "config"]
    for title, control in (("Algorithm", ".p-select-button"), ("Seed", "input[type=number]"), ("Model", "textarea")):
        assert field(page, title).locator(control).count() == 1, title
    reward = page.locator(f"{FIELD}-any-of-input", has=page.get_by_text("of your own", exact=True)).last
    assert reward.locator(".p-select-button").count() == 1


def test_a_wrong_value_is_refused_with_its_field_and_what_would_be_right(
    shown: Shown, deployment: str, browser: BrowserContext
) -> None:
    page = opened(browser, f"{deployment}/run", "Total Training Steps")
    field(page, "Lr").locator("input").fill("-1")
    page.get_by_role("button", name="Submit").click()
    wait_for_text(page, "Validation failed for field 'common.lr'")
    assert "-1 is less than or equal to the minimum of 0" in text_of(page)
    made = post(f"{shown.prefect}/api/flow_runs/filter", {"deployments": {"name": {"any_": ["tiny"]}}})
    assert made == [], "nothing was created"
