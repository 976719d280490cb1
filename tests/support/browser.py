# SPDX-License-Identifier: Apache-2.0
"""A browser without a window, and the pages of real servers in it."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import BrowserContext, Page, sync_playwright

from tests.support.patience import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
VARIABLE = "DOUBLEFLOW_BROWSER"
WINDOW = {"width": 1440, "height": 1000}


def browser_program() -> str:
    """Chromium or Chrome: what the variable names, else the first on the path.

    Raises:
        RuntimeError: there is none.
    """
    found = os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError(f"no browser: install Chromium or Chrome, or name the program in {VARIABLE}")
    return found


@contextmanager
def browsing(user: str | None = None, password: str = "") -> Iterator[BrowserContext]:
    """A browser that remembers nothing yet; as root it cannot have its sandbox."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=browser_program(), args=arguments)
        known = {"username": user, "password": password} if user else None
        context = program.new_context(viewport=WINDOW, http_credentials=known)
        context.set_default_timeout(1000 * PATIENCE)
        try:
            yield context
        finally:
            program.close()


def opened(context: BrowserContext, address: str, *shows: str) -> Page:
    """A page, once all of these texts are seen on it."""
    page = context.new_page()
    page.goto(address, wait_until="domcontentloaded")
    for text in shows:
        wait_for_text(page, text)
    return page


def wait_for_text(page: Page, text: str) -> None:
    """Until the text is seen."""
    page.get_by_text(text).locator("visible=true").first.wait_for()


def settle(page: Page) -> None:
    """Until nothing on the page turns any more, for a picture of it."""
    page.wait_for_function("document.querySelectorAll('[aria-busy=true], .ant-spin').length == 0")
    page.wait_for_timeout(3000)


def text_of(page: Page) -> str:
    """All that is written on the page, in one line."""
    return re.sub(r"\s+", " ", page.inner_text("body"))


def picture_of(page: Page, file: Path) -> None:
    """What the window shows, as a picture."""
    settle(page)
    page.screenshot(path=file)


CONTRASTS = """() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join(" ").trim();
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    if (!text || !box.width || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const ink = light(numbers(element.namespaceURI.endsWith("svg") ? style.fill : style.color));
    const paper = light(behind(element));
    const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
    found[text.slice(0, 60)] = Math.min(ratio, found[text.slice(0, 60)] ?? 99);
  }
  return found;
}"""


def contrasts(page: Page) -> dict[str, float]:
    """Each text on the page -> its contrast with the colour behind it, from 1 to 21, as WCAG 2 counts it."""
    return dict(page.evaluate(CONTRASTS))
