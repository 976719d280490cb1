# SPDX-License-Identifier: Apache-2.0
"""The docs' pictures of MLflow's and Prefect's pages, from two short runs on servers of their own: `make screenshots`.

It takes some minutes, and wants the data of `make data` and a browser (tests/support/browser.py).
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import BrowserContext, Page

from tests.support.browser import browsing, opened, picture_of
from tests.support.forked import Program
from tests.support.patience import PATIENCE, wait_for_server
from tests.support.platform_helpers import background, free_port
from tests.support.shown_run import USER, MlflowServer, mlflow_server

DOCS = Path(__file__).parent
COLOURS = 128
"""Of a picture: pages have few, and so it has less than 200 kB."""
SHORT = ("trainer.total_training_steps=4", "trainer.test_freq=2", "trainer.save_freq=0")


@contextmanager
def prefect_server(folder: Path) -> Iterator[dict[str, str]]:
    """On loopback; the variables that lead to it."""
    port = free_port()
    variables = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with background(command, os.environ | variables, folder / "prefect-server.log", folder):
        wait_for_server(f"{variables['PREFECT_API_URL']}/health", "the Prefect server's start")
        yield variables


def train(folder: Path, environment: dict[str, str], seed: int) -> None:
    """A short run of the quickstart, in this folder's data."""
    given = [*SHORT, f"trainer.seed={seed}", f"trainer.default_local_dir={folder / 'runs'}"]
    changes = [word for setting in given for word in ("--set", setting)]
    log = folder / f"train-{seed}.log"
    code = Program(("-m", "flows.train", "quickstart", *changes), Path.cwd(), environment, log).wait(PATIENCE)
    if code:
        raise RuntimeError(f"the run failed: {log.read_text()[-3000:]}")


def keep(page: Page, name: str) -> None:
    """The window as docs/<name>.png."""
    file = DOCS / f"{name}.png"
    picture_of(page, file)
    Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
    page.close()
    print(f"{file.relative_to(Path.cwd())}  {file.stat().st_size // 1024} kB", flush=True)


def draw(browser: BrowserContext, server: MlflowServer) -> None:
    """Every picture."""
    second, first = server.runs()
    experiment = first.info.experiment_id
    place = f"{server.address}/#/experiments/{experiment}"
    run = f"{place}/runs/{first.info.run_id}"
    keep(opened(browser, f"{place}/runs", "1_headline/reward", first.info.run_name), "mlflow_runs")
    keep(opened(browser, run, "Learnt:", "Registered models"), "mlflow_run")
    charts = opened(browser, f"{run}/model-metrics", "1_headline")
    charts.locator("img[src^='blob:'], img[src*='get-artifact']").first.wait_for()
    keep(charts, "mlflow_picture_slider")
    ids = f'["{first.info.run_id}","{second.info.run_id}"]'
    compared = f'{server.address}/#/compare-runs?runs={ids}&experiments=["{experiment}"]'
    keep(opened(browser, compared, "Visualizations"), "mlflow_comparison_page")
    keep(opened(browser, first.data.tags["doubleflow.prefect_flow_run"], "Completed", "Artifacts"), "prefect_run_page")


def main() -> None:
    """Train, look, keep."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with prefect_server(folder) as prefect, mlflow_server(folder) as server:
            for seed in (0, 1):
                train(folder, os.environ | prefect | server.environment, seed)
            with browsing(USER, server.password) as browser:
                draw(browser, server)


if __name__ == "__main__":
    main()
