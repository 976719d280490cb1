# SPDX-License-Identifier: Apache-2.0
"""MLflow's names, with MLflow imported at the first use of one: 1.4 s of processor time, after a run's checks.

No module of a flow imports MLflow itself. What is called, raised or read is written `mlflow.MlflowClient`,
`mlflow.entities.Metric`; the types here stand in signatures alone, and are `Any` when the program runs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlflow
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, LoggedModel, Run, RunInfo
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.store.artifact import artifact_repository_registry
    from mlflow.utils import mlflow_tags
else:
    import importlib
    import logging
    import os
    from functools import cache
    from types import ModuleType

    @cache
    def _imported(name: str) -> ModuleType:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # a run's own summary has the page
        module = importlib.import_module(name)
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it tells how it makes its data base
        return module

    class _Late(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(_imported(self.__name__), name)

    mlflow, mlflow_tags = _Late("mlflow"), _Late("mlflow.utils.mlflow_tags")
    artifact_repository_registry = _Late("mlflow.store.artifact.artifact_repository_registry")
    MlflowClient = DatasetInput = LoggedModel = ModelVersion = Run = RunInfo = Any

__all__ = [
    "DatasetInput",
    "LoggedModel",
    "MlflowClient",
    "ModelVersion",
    "Run",
    "RunInfo",
    "artifact_repository_registry",
    "mlflow",
    "mlflow_tags",
]
