# SPDX-License-Identifier: Apache-2.0
"""The maths and the engines: no Prefect, Ray or MLflow below this line, so a notebook or a profiler can use them."""

from models.runtime.torchvision_ops import declare_missing

declare_missing()
