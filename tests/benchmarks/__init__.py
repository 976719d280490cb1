# SPDX-License-Identifier: Apache-2.0
"""Benchmarks make the runs that they say, and their tables are of what was logged."""
