"""The stages: Prefect tasks, the Ray actors that serve them, and what both read and write."""
