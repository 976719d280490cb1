# SPDX-License-Identifier: Apache-2.0
"""What MLflow's pages show to a browser that has not chosen anything there yet.

MLflow 3 keeps such choices in the browser: whether its pages are those for prompts or for trained models, which columns
the table of runs has, how charts look. Its own first choice is the pages for prompts, no metric in the table, and cards
on which a run's parameters push the picture out; tags of the experiment do not change it. So the page that this server
sends begins with a script that answers for what the browser does not remember. A choice made there is kept as always.
"""

import json
from collections.abc import MutableMapping
from typing import Any

from flows.deploy.asgi import Application, Message, Receive, Send
from tasks.records.headline import HEADLINE, MACHINE_LEARNING, PICTURES, runs_view

PAGE = "/"
CARDS = ("held_out", "reward", *PICTURES, "images_per_second", "gpu_hours", "hours")
"""In the order of the page."""
NOT_KEPT = (b"if-none-match", b"if-modified-since")
"""A copy of the page that a browser has from another server on this port lacks the script."""


def remembered() -> dict[str, Any]:
    """Regular expression of a key in the browser's memory -> the answer where there is none."""
    section = {"uuid": HEADLINE, "name": HEADLINE, "display": True, "isReordered": False, "isGenerated": True}
    return {
        r"^mlflow\.workflowType_v1$": MACHINE_LEARNING,
        r"^mlflow\.assistant\.fab\.autoOpenedOnFirstLoad_v1$": True,
        r'-ExperimentPage-\["\d+"\]-ReactComponentState$': runs_view(),
        r"-RunPage-[0-9a-f]{32}-model-chartUIState$": {
            "compareRunSections": [section],  # MLflow adds the sections and the charts that are not here
            "compareRunCharts": [_chart(name) for name in CARDS],
            "isAccordionReordered": False,
            "autoRefreshEnabled": True,
            "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        },
    }


def _chart(name: str) -> dict[str, Any]:
    """A card of the section, as MLflow's pages keep it."""
    card = {"uuid": name, "metricSectionId": HEADLINE, "isGenerated": True, "deleted": False, "runsCountToCompare": 10}
    key = f"{HEADLINE}/{name}"
    if name in PICTURES:
        return card | {"type": "IMAGE", "imageKeys": [key], "step": PICTURES[name], "showRunParams": False}
    axes = {"xAxisKey": "step", "xAxisScaleType": "linear", "scaleType": "linear", "range": {}, "yAxisKey": "metric"}
    of_all = {"useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "lineSmoothness": 0}
    return card | axes | of_all | {"type": "LINE", "metricKey": key, "displayName": name, "yAxisExpressions": []}


def script() -> str:
    """The element for the page's head."""
    answers = json.dumps([[pattern, json.dumps(answer)] for pattern, answer in remembered().items()])
    return f"""<script>
(() => {{
  const answers = {answers}.map(([key, answer]) => [new RegExp(key), answer]);
  const remembered = Storage.prototype.getItem;
  Storage.prototype.getItem = function (key) {{
    return remembered.call(this, key) ?? answers.find(([pattern]) => pattern.test(key))?.[1] ?? null;
  }};
}})();
</script>"""


def with_first_visit(app: Application) -> Application:
    """The application, with the script in its page."""
    element = script().encode()

    async def changed(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PAGE:
            await app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in NOT_KEPT]
        await app({**scope, "headers": headers}, receive, _Inserting(send, element))

    return changed


class _Inserting:
    """`send` of a page: the element goes in at the end of its head, wherever the parts of its body end."""

    def __init__(self, send: Send, element: bytes):
        self.send, self.element = send, element
        self.start: Message = {}
        self.body = b""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            return
        self.body += message.get("body", b"")
        if message.get("more_body"):
            return
        page = self.body.replace(b"<head>", b"<head>" + self.element, 1)
        length = (b"content-length", str(len(page)).encode())
        headers = [(name, value) for name, value in self.start["headers"] if name.lower() != length[0]]
        await self.send({**self.start, "headers": [*headers, length]})
        await self.send({"type": "http.response.body", "body": page})
