"""What passes between rollout and update."""
