# SPDX-License-Identifier: Apache-2.0
"""What runs in other processes, and how the driver speaks with it."""

import os

RETRIED = r"^Task .* failed\. There are \d+ retries remaining, so the task will be retried\. Error: User exception"
"""Ray prints it, with all frames, of every try of a reward that fails. The last error is the run's."""
# Ray reads it when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RETRIED)
