"""Sampling: the rollout engines and the denoising loop."""
