# SPDX-License-Identifier: Apache-2.0
"""Servers and workspaces of the whole runs, as in tests/platform. Tests of models/ alone run without Prefect too."""

import importlib.util

import models  # noqa: F401  before diffusers, see models/runtime/torchvision_ops.py

if all(importlib.util.find_spec(name) for name in ("prefect", "mlflow", "ray")):
    from tests.support.platform_helpers import prefect_server, prepared, workspace

    __all__ = ["prefect_server", "prepared", "workspace"]
else:
    collect_ignore = ["test_flow.py", "test_weight_transport_on_cuda.py"]
