# SPDX-License-Identifier: Apache-2.0
"""Tests of the models floor: without Ray, Prefect or MLflow."""
