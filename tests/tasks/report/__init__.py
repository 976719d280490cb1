# SPDX-License-Identifier: Apache-2.0
"""A run's own page."""
