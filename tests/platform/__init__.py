"""Whole runs with real Prefect, Ray, MLflow and DVC."""
