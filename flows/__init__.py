# SPDX-License-Identifier: Apache-2.0
"""What runs when: the flows and their typed parameters."""

import os

# A closed network must cost nothing and nobody is watched: each of these programs would call home otherwise. (One is
# there for the terminal: MLflow would draw a bar of its own for every artifact.)
for _switch in (
    "DO_NOT_TRACK=true",
    "MLFLOW_DISABLE_TELEMETRY=true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR=false",
    "PREFECT_SERVER_ANALYTICS_ENABLED=false",
    "RAY_USAGE_STATS_ENABLED=0",
    "DVC_NO_ANALYTICS=1",
    "HF_HUB_DISABLE_TELEMETRY=1",
):
    os.environ.setdefault(*_switch.split("=", 1))
