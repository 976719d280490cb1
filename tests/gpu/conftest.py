"""Servers and workspaces of the whole runs, as in tests/platform."""

from platform_helpers import prefect_server, prepared, workspace

__all__ = ["prefect_server", "prepared", "workspace"]
