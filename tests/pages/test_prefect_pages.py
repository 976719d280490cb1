# SPDX-License-Identifier: Apache-2.0
"""Prefect's pages of a run, and the form that starts one."""

import re
from typing import Any

from playwright.sync_api import BrowserContext, Locator, Page

from tasks.config.common import CommonSettings
from tasks.config.overrides import flat
from tasks.config.tree import TrainConfig
from tests.pages.conftest import Shown
from tests.support.browser import opened, text_of, wait_for_text
from tests.support.patience import post, wait_until

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
    """The first field of this title: those of `common` come before the recipe's."""
    label = f"> .p-label__header .schema-form-property__label:text-is('{title} (Optional)')"
    return page.locator(f"{FIELD}:has({label})").first


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


def runs_of(shown: Shown) -> list[dict[str, Any]]:
    """The flow runs that were created of the deployment."""
    return list(post(f"{shown.prefect}/api/flow_runs/filter", {"deployments": {"name": {"any_": ["tiny"]}}}))


def test_a_wrong_value_is_refused_at_its_field_with_what_would_be_right(
    shown: Shown, deployment: str, browser: BrowserContext
) -> None:
    page = opened(browser, f"{deployment}/run", "Total Training Steps")
    field(page, "Lr").locator("input").fill("-1")
    page.get_by_role("button", name="Submit").click()
    field(page, "Lr").get_by_text("-1 is less than or equal to the minimum of 0").wait_for()
    assert runs_of(shown) == [], "nothing was created"


def test_a_run_from_the_form_has_the_recipe_and_what_was_typed(
    shown: Shown, deployment: str, browser: BrowserContext
) -> None:
    """What nobody has touched changes nothing: no switch is off, and no section begun."""
    page = opened(browser, f"{deployment}/run", "Total Training Steps")
    field(page, "Lr").locator("input").fill("0.5")
    page.get_by_role("button", name="Submit").click()
    (run,) = wait_until(lambda: runs_of(shown), "a run of the deployment")
    (made,) = post(f"{shown.prefect}/api/deployments/filter", {"deployments": {"name": {"any_": ["tiny"]}}})
    ran, recipe = run["parameters"]["config"], made["parameters"]["config"]
    assert flat(ran) == flat(recipe), "but for sections that are empty"
    assert TrainConfig.model_validate(ran).model_dump() == TrainConfig.model_validate(recipe).model_dump()
    assert run["parameters"]["common"] == {"lr": 0.5}
    assert flat(run["parameters"]["overrides"]) == {}
