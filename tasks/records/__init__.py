"""What stays of a run: checkpoints, MLflow, lineage, guards, pictures."""
