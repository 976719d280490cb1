# SPDX-License-Identifier: Apache-2.0
"""Processes, files and what is written behind a run."""
