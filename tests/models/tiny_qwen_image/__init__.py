# SPDX-License-Identifier: Apache-2.0
"""The quickstart's base model."""
