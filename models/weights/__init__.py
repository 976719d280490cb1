# SPDX-License-Identifier: Apache-2.0
"""Weights on their way: what is trained, how it travels, whether it arrived."""
