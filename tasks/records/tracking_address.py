# SPDX-License-Identifier: Apache-2.0
"""Whether MLflow's server answers, found out without MLflow and Prefect, whose imports take seconds."""

import ssl
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import urlopen

from models.errors import DoubleflowError

START_SECONDS = 10.0
"""For the first answer of a run's start: nothing is lost yet, and a wrong address is soon known."""


class TrackingAway(DoubleflowError, RuntimeError):
    """The MLflow server has not answered for too long."""


def require_answer(uri: str, seconds: float = START_SECONDS) -> None:
    """Wait until the server says that it is there. Anything but a server passes.

    Raises:
        TrackingAway: it does not within the time.
    """
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
