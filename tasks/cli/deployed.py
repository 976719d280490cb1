# SPDX-License-Identifier: Apache-2.0
"""What a flow says that is started as a command, but runs as a deployment only."""

import sys
from typing import NoReturn


def refuse(flow: str) -> NoReturn:
    """End this process as wrong input does, in a sentence that says how the flow is run.

    Args:
        flow: its name, which is its deployment's, too.
    """
    print(f"error: a deployment: `make up`, then `prefect deployment run {flow}/{flow}`", file=sys.stderr)
    raise SystemExit(2)
