# SPDX-License-Identifier: Apache-2.0
"""Whether MLflow keeps runs at an address, and its server answers: without MLflow and Prefect, whose imports take
seconds."""

import os
import ssl
import time
from http.client import HTTPException
from importlib.metadata import entry_points
from urllib.error import HTTPError
from urllib.request import urlopen

from models.errors import DoubleflowError

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
OTHERS = ("http", "https", "databricks", "databricks-uc", "uc")
ARTIFACTS = (
    *("file", "s3", "r2", "b2", "gs", "wasbs", "abfss", "ftp", "sftp", "dbfs", "hdfs", "viewfs"),
    *("http", "https", "mlflow-artifacts"),
)
"""Schemes under which MLflow keeps files."""
PLUGINS, ARTIFACT_PLUGINS = "mlflow.tracking_store", "mlflow.artifact_repository"
"""Entry points of these groups are further schemes, as azureml is."""
FOLDERS_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"
"""MLflow's own variable; without it MLflow refuses a folder."""
START_SECONDS = 10.0
"""For the first answer of a run's start: nothing is lost yet, and a wrong address is soon known."""


class TrackingAway(DoubleflowError, RuntimeError):
    """The MLflow server has not answered for too long."""


class NoTrackingAddress(DoubleflowError, ValueError):
    """MLflow keeps no runs at such an address."""


def check_address(uri: str) -> None:
    """Raise NoTrackingAddress for what MLflow itself would refuse once the run has begun: a folder, as `mlflow.db`
    without sqlite:/// is one, and a scheme that nobody knows."""
    scheme = uri.partition(":")[0].lower()
    if ":" in uri and scheme != "file":
        known = scheme.partition("+")[0] in DATABASES + OTHERS or bool(entry_points(group=PLUGINS, name=scheme))
        why = f"and MLflow knows no {scheme}"
    else:
        known = uri in OTHERS or os.environ.get(FOLDERS_ALLOWED, "").lower() in ("1", "true")
        why = "which MLflow takes for a folder, and keeps no runs in one any more"
    if not known:
        raise NoTrackingAddress(
            f"tracking.uri, or MLFLOW_TRACKING_URI, is {uri}, {why}: give a database, as in sqlite:///mlflow.db, or "
            "the address of a server"
        )


def check_artifacts(root: str) -> None:
    """Raise NoTrackingAddress for an artifact root of a scheme that MLflow does not know. MLflow would make an
    experiment with it, whose later runs have that root whatever they say."""
    scheme, colon, _ = root.lower().partition(":")
    if colon and scheme not in ARTIFACTS and not entry_points(group=ARTIFACT_PLUGINS, name=scheme):
        raise NoTrackingAddress(
            f"tracking.artifacts is {root}, and MLflow knows no {scheme}: give a folder, or the address of a store, as "
            "in s3://bucket/folder"
        )


def require_answer(uri: str, seconds: float = START_SECONDS) -> None:
    """Wait until the server says that it is there. Any other address at which MLflow keeps runs passes.

    Raises:
        NoTrackingAddress: see `check_address`.
        TrackingAway: it does not within the time.
    """
    check_address(uri)
    if not is_server(uri):
        return
    deadline, reason = time.monotonic() + seconds, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            urlopen(f"{uri.rstrip('/')}/health", timeout=left).close()
        except HTTPError:  # whoever answers, and whatever
            return
        except (OSError, HTTPException) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, ssl.SSLError):  # certificates are looked at by the requests that hold something
                return
            reason = str(cause) or type(cause).__name__
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        else:
            return
    raise TrackingAway(
        f"MLflow at {uri} did not answer within {seconds:g} s ({reason}): start it, or correct MLFLOW_TRACKING_URI or "
        "tracking.uri"
    )


def is_server(uri: str) -> bool:
    """Is MLflow asked by HTTP there? Else it is a data base or a folder, which this process opens itself."""
    return uri.startswith(("http://", "https://"))
