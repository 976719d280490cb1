# SPDX-License-Identifier: Apache-2.0
"""What is decided before a run opens and between its iterations."""
