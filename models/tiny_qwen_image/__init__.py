# SPDX-License-Identifier: Apache-2.0
"""A Qwen-Image pipeline of under a million weights which a laptop pre-trains in minutes."""
