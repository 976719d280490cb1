# SPDX-License-Identifier: Apache-2.0
"""What runs in other processes, and how the driver speaks with it."""

import os

from tasks.system.collector import take_large_steps

RETRIED = r"^Task .* failed\. There are \d+ retries remaining, so the task will be retried\. Error: User exception"
"""Ray prints it, with all frames, of every try of a reward that fails. The last error is the run's."""
MANY_WORKERS = r"^WARNING: \d+ PYTHON worker processes have been started on node"
"""The raylet warns at each multiple of its machine's cores, from four times on, of all but eight: of sixteen on two
cores, which the runs of a sweep may have. How many they are is in the config. The raylet's own log keeps the line."""
# Ray reads them when it is imported. Without the second a thread that still asks an actor, when the run has left the
# cluster, would start another one.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", f"{RETRIED}|{MANY_WORKERS}")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
take_large_steps()
