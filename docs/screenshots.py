# SPDX-License-Identifier: Apache-2.0
"""The docs' pictures of the pages of two short runs, on servers of their own: `make screenshots`.

Those of MLflow and Prefect, a run's own page, and the page of both. It takes some minutes, and wants the data of
`make data` and a browser (tests/support/browser.py).
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_GIT_BRANCH
from PIL import Image
from playwright.sync_api import BrowserContext, Page

from tasks.records.headline import FLOW_RUN_TAG, REPORT, RUN_NAME_TAG
from tests.support.browser import browsing, opened, picture_of
from tests.support.forked import Program
from tests.support.patience import PATIENCE, post, wait_for_server
from tests.support.platform_helpers import background, free_port
from tests.support.shown_run import USER, MlflowServer, mlflow_server

DOCS = Path(__file__).parent
COLOURS = 256
"""Of a picture: pages have few, and so it has less than 200 kB."""
SHORT = ("trainer.total_training_steps=6", "trainer.test_freq=2", "trainer.save_freq=0")
POOL = "local"
"""The work pool of prefect.yaml."""


@contextmanager
def prefect_server(folder: Path) -> Iterator[dict[str, str]]:
    """On loopback; the variables that lead to it."""
    port = free_port()
    variables = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with background(command, os.environ | variables, folder / "prefect-server.log", folder):
        wait_for_server(f"{variables['PREFECT_API_URL']}/health", "the Prefect server's start")
        yield variables


def run(folder: Path, environment: dict[str, str], *arguments: str) -> None:
    """`python -m ...` in the project's folder; it must succeed."""
    log = folder / f"{'-'.join(arguments[:4]).replace('/', '-')}.log"
    code = Program(("-m", *arguments), Path.cwd(), environment, log).wait(PATIENCE)
    if code:
        raise RuntimeError(f"{' '.join(arguments)} failed: {log.read_text()[-3000:]}")


def train(folder: Path, environment: dict[str, str], seed: int) -> None:
    """A short run of the quickstart, in this folder's data."""
    given = [*SHORT, f"trainer.seed={seed}", f"trainer.default_local_dir={folder / 'runs'}"]
    run(folder, environment, "flows.train", "quickstart", *(word for setting in given for word in ("--set", setting)))


def deploy(folder: Path, environment: dict[str, str]) -> None:
    """The quickstart, for the form of its parameters."""
    there = environment | {"DOUBLEFLOW_HOME": str(Path.cwd())}
    run(folder, there, "prefect", "--no-prompt", "work-pool", "create", POOL, "--type", "process")
    run(folder, there, "prefect", "--no-prompt", "deploy", "--name", "quickstart")


def keep(page: Page, name: str) -> None:
    """The window as docs/<name>.png."""
    file = DOCS / f"{name}.png"
    picture_of(page, file)
    Image.open(file).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)
    page.close()
    print(f"{file.relative_to(Path.cwd())}  {file.stat().st_size // 1024} kB", flush=True)


def draw_mlflow(browser: BrowserContext, server: MlflowServer, first: Run) -> None:
    """The table of runs, a run's description, and its charts."""
    place = f"{server.address}/#/experiments/{first.info.experiment_id}"
    page = f"{place}/runs/{first.info.run_id}"
    keep(opened(browser, f"{place}/runs", "1_headline/reward", first.info.run_name), "mlflow_runs")
    keep(opened(browser, page, "Learnt:", "Registered models"), "mlflow_run")
    charts = opened(browser, f"{page}/model-metrics", "1_headline")
    charts.locator("img[src^='blob:'], img[src*='get-artifact']").first.wait_for()
    keep(charts, "mlflow_picture_slider")


def draw_prefect(browser: BrowserContext, api: str, flow_run: str) -> None:
    """A flow run, its progress, and the form of a deployment's parameters."""
    keep(opened(browser, flow_run, "Completed", "Artifacts"), "prefect_run_page")
    mine = {"flow_runs": {"id": {"any_": [flow_run.rpartition("/")[2]]}}}
    (progress,) = post(f"{api}/artifacts/filter", mine | {"artifacts": {"key": {"any_": ["training"]}}})
    server = api.removesuffix("/api")
    keep(opened(browser, f"{server}/artifacts/artifact/{progress['id']}", "held-out pictures"), "prefect_progress")
    (form,) = post(f"{api}/deployments/filter", {"deployments": {"name": {"any_": ["quickstart"]}}})
    keep(opened(browser, f"{server}/deployments/deployment/{form['id']}/run", "common"), "prefect_form")


def draw_own(browser: BrowserContext, report: Path, compared: Path) -> None:
    """The run's own page, its best and worst pictures, and the page of two runs."""
    keep(opened(browser, report.as_uri(), "Held-out pictures"), "report")
    keep(opened(browser, f"{report.as_uri()}#samples", "Best and worst"), "report_samples")
    keep(opened(browser, compared.as_uri(), "Pictures"), "compare_page")


def main() -> None:
    """Train, look, keep."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with prefect_server(folder) as prefect, mlflow_server(folder) as server:
            environment = os.environ | prefect | server.environment
            for seed in (0, 1):
                train(folder, environment, seed)
            second, first = server.runs()
            ids = [second.info.run_id, first.info.run_id]
            MlflowClient(server.address).delete_tag(first.info.run_id, MLFLOW_GIT_BRANCH)  # whichever branch this is
            run(folder, environment, "flows.compare", *ids, "--folder", str(folder))
            deploy(folder, environment)
            tags = first.data.tags
            with browsing(USER, server.password) as browser:
                (compared,) = folder.glob("compare-*.html")
                draw_own(browser, folder / "runs" / tags[RUN_NAME_TAG] / REPORT, compared)
                draw_mlflow(browser, server, first)
                draw_prefect(browser, prefect["PREFECT_API_URL"], tags[FLOW_RUN_TAG])


if __name__ == "__main__":
    main()
