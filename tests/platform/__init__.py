# SPDX-License-Identifier: Apache-2.0
"""Whole runs with real Prefect, Ray, MLflow and DVC."""
