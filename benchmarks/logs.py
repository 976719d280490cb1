# SPDX-License-Identifier: Apache-2.0
"""The logs of benchmarks: a line of JSON for each thing that was measured."""

import json
from pathlib import Path
from typing import Any


def rows_in(log: Path) -> list[dict[str, Any]]:
    """The log's lines in their order; none where it is not there yet."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
