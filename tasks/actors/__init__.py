# SPDX-License-Identifier: Apache-2.0
"""What runs in other processes, and how the driver speaks with it."""
