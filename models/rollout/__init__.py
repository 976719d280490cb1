# SPDX-License-Identifier: Apache-2.0
"""Sampling: the rollout engines and the denoising loop."""
