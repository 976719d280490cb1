# SPDX-License-Identifier: Apache-2.0
"""Whose code an import path of the config may name."""

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
    setting = os.environ.get(ALLOWED)
    if setting is None:
        return
    module = path.partition(":")[0]
    allowed = [name.strip() for name in setting.split(",") if name.strip()]
    if not any(module == name or module.startswith(f"{name}.") for name in allowed):
        raise ModuleNotAllowed(
            f"{path!r} names code of the module {module!r}, and {ALLOWED} allows {', '.join(allowed) or 'none'}: use a "
            "registered name, or add the module there"
        )
