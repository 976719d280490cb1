# SPDX-License-Identifier: Apache-2.0
"""The model families: the project's own, those of installed packages, and those of modules that a config names.

`DiffusionModelBase.get_class` asks for all of them, so that a family is
known in every process that looks for its adapter: driver, rollout worker, trainer rank, and vLLM-Omni's processes.
"""

import functools
import importlib
from importlib.metadata import entry_points

from models.import_paths import check_allowed

__all__ = ["GROUP", "OWN", "load_families", "load_others"]

OWN = ("flux", "flux_2_klein", "qwen_image", "stable_diffusion_3", "wan", "z_image")
"""Modules of this package, each of which registers one family when imported."""

GROUP = "doubleflow.families"
"""Entry points of this group are modules that register families, kernels, losses or advantages when imported."""


def load_families(external_lib: str | None = None) -> None:
    """Import what registers families: the project's own, installed packages' and those named, once in a process.

    Args:
        external_lib: modules to import, separated by commas, beside those of installed packages.

    Raises:
        ValueError: one of them cannot be imported.
    """
    _load_own()
    load_others(external_lib)


def load_others(external_lib: str | None = None) -> None:
    """The same without the project's own, whose imports take seconds: for a look at the names of all else."""
    _load_installed()
    for name in (external_lib or "").split(","):
        if name.strip():
            check_allowed(name.strip())
            _import(name.strip(), f"actor_rollout_ref.model.external_lib names {name.strip()!r}")


@functools.cache
def _load_own() -> None:
    for name in OWN:
        importlib.import_module(f"{__name__}.{name}")


@functools.cache
def _load_installed() -> None:
    for entry in entry_points(group=GROUP):
        _import(entry.module, f"entry point {entry.name!r} of group {GROUP} is {entry.value!r}")


def _import(name: str, said_by: str) -> None:
    try:
        importlib.import_module(name)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(f"{said_by}, which cannot be imported: {error}") from error
