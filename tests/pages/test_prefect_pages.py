# SPDX-License-Identifier: Apache-2.0
"""Prefect's pages of a run."""

from playwright.sync_api import BrowserContext

from tests.pages.conftest import Shown
from tests.support.browser import opened, text_of


def test_the_link_in_mlflow_opens_the_flow_run(shown: Shown, browser: BrowserContext) -> None:
    """Prefect's graph, its tasks and the progress artifact are there."""
    page = opened(browser, shown.tags["doubleflow.prefect_flow_run"], "Completed", "Artifacts", "Task Runs")
    assert "train" in text_of(page)
