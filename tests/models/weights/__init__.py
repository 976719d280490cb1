# SPDX-License-Identifier: Apache-2.0
"""Which weights train, how they are copied, and what proves that they arrived."""
