# SPDX-License-Identifier: Apache-2.0
"""What settings mean, which are refused and how, and what becomes of other frameworks' settings."""
