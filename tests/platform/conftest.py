# SPDX-License-Identifier: Apache-2.0
"""The fixtures of `platform_helpers`, for every test in this folder."""

from tests.support.platform_helpers import prefect_server, prepared, ray_head, workspace

__all__ = ["prefect_server", "prepared", "ray_head", "workspace"]
