# SPDX-License-Identifier: Apache-2.0
"""Sections of the configuration that the models floor reads."""
