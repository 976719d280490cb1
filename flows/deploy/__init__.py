# SPDX-License-Identifier: Apache-2.0
"""Servers and deployments: machines, not runs."""
