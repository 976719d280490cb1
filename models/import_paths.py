# SPDX-License-Identifier: Apache-2.0
"""Whose code an import path, or a program, of the config may name."""

import os

from models.errors import DoubleflowError

ALLOWED = "DOUBLEFLOW_ALLOWED_MODULES"


class ModuleNotAllowed(DoubleflowError, ValueError):
    """A config names code of a module that this machine's setting does not allow."""


def check_allowed(path: str) -> None:
    """Raise ModuleNotAllowed where the module of "package.module:attribute" must not be imported.

    The environment variable DOUBLEFLOW_ALLOWED_MODULES lists packages and modules, separated by commas; what is below
    one of them is allowed with it. Not set, everything is allowed; empty, nothing is. Registered names are no paths and
    never asked about.
    """
    allowed = _allowed()
    module = path.partition(":")[0]
    if allowed is not None and not any(module == name or module.startswith(f"{name}.") for name in allowed):
        raise ModuleNotAllowed(
            f"{path!r} names code of the module {module!r}, and {ALLOWED} allows {', '.join(allowed) or 'none'}: use a "
            "registered name, or add the module there"
        )


def check_allowed_program(field: str, path: str) -> None:
    """Raise ModuleNotAllowed where a program must not be run: DOUBLEFLOW_ALLOWED_MODULES is set and lacks its path."""
    allowed = _allowed()
    if allowed is not None and path not in allowed:
        raise ModuleNotAllowed(
            f"{field} has {path} run, as the config says, and {ALLOWED} allows {', '.join(allowed) or 'none'}: "
            "leave the field out, or add the path there"
        )


def _allowed() -> list[str] | None:
    setting = os.environ.get(ALLOWED)
    return None if setting is None else [name.strip() for name in setting.split(",") if name.strip()]
