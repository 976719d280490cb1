# SPDX-License-Identifier: Apache-2.0
"""Which vLLM-Omni pipeline samples an architecture."""

from collections.abc import Callable

from models.registry import C, Registry

_PIPELINES = Registry("A vLLM-Omni pipeline")


class VllmOmniPipelineBase:
    """Registry of vLLM-Omni pipeline classes; the class itself is imported by the engine's worker, by path."""

    @classmethod
    def register(cls, architecture: str, algorithm: str | None = None) -> Callable[[C], C]:
        """Class decorator, keyed like `DiffusionModelBase.register`."""
        return _PIPELINES.register(architecture, algorithm)

    @classmethod
    def get_class(cls, architecture: str, algorithm: str) -> type | None:
        """The registered pipeline class, or None."""
        return _PIPELINES.find(architecture, algorithm)

    @classmethod
    def get_pipeline_path(cls, architecture: str, algorithm: str) -> str | None:
        """Its dotted import path, or None."""
        found = cls.get_class(architecture, algorithm)
        return None if found is None else f"{found.__module__}.{found.__qualname__}"
