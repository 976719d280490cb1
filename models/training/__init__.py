"""The update: training engines, micro-batches, the policy under gradient."""
