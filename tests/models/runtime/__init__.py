# SPDX-License-Identifier: Apache-2.0
"""Compiled code rounds alike on both sides."""
