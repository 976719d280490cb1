# SPDX-License-Identifier: Apache-2.0
"""Advantages, losses and corrections against the formulas in plain floats."""
