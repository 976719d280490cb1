"""Engines: what samples (rollout) and what trains (update), over one sampling loop and one reverse step."""
