# SPDX-License-Identifier: Apache-2.0
"""What runs in other processes, and how the driver speaks with it."""

import os

from tasks.system.collector import take_large_steps

RETRIED = r"^Task .* failed\. There are \d+ retries remaining, so the task will be retried\. Error: User exception"
"""Ray prints it, with all frames, of every try of a reward that fails. The last error is the run's."""
# Ray reads them when it is imported. Without the second a thread that still asks an actor, when the run has left the
# cluster, would start another one.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RETRIED)
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
take_large_steps()
