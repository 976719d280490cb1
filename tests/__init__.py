# SPDX-License-Identifier: Apache-2.0
"""Tests that mirror the source, a folder a floor."""
