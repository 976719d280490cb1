# SPDX-License-Identifier: Apache-2.0
"""Rewards against closed forms, real servers and small random models."""
