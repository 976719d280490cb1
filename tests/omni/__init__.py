# SPDX-License-Identifier: Apache-2.0
"""Tests of vLLM-Omni, in an environment of its own."""
