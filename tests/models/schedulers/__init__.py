# SPDX-License-Identifier: Apache-2.0
"""Kernels, windows and the schedule against the papers' formulas and diffusers'."""
