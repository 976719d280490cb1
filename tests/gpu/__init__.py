# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU."""
