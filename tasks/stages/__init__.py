"""The Prefect tasks, one module a stage."""
