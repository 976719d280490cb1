# SPDX-License-Identifier: Apache-2.0
"""Tests of the flows and of the commands."""
