# SPDX-License-Identifier: Apache-2.0
"""Memory and operations, counted before anything runs."""
