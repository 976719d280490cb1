"""Tests of the models floor: without Ray, Prefect or MLflow."""
