# SPDX-License-Identifier: Apache-2.0
"""What runs when: the flows and their typed parameters."""

import os

from tasks.system.collector import take_large_steps

take_large_steps()
# A closed network must cost nothing and nobody is watched: each of these programs would call home otherwise. (The
# last are there for the terminal: libraries would draw bars of their own for every file.)
for _switch in (
    "DO_NOT_TRACK=true",
    "MLFLOW_DISABLE_TELEMETRY=true",
    "PREFECT_SERVER_ANALYTICS_ENABLED=false",
    "RAY_USAGE_STATS_ENABLED=0",
    "DVC_NO_ANALYTICS=1",
    "HF_HUB_DISABLE_TELEMETRY=1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR=false",
    "HF_HUB_DISABLE_PROGRESS_BARS=1",
    "TRANSFORMERS_VERBOSITY=error",
):
    os.environ.setdefault(*_switch.split("=", 1))
