"""Servers and workspaces of the whole runs, as in tests/platform."""

import models  # noqa: F401, I001  before diffusers, see models/torchvision_ops.py
from platform_helpers import prefect_server, prepared, workspace

__all__ = ["prefect_server", "prepared", "workspace"]
