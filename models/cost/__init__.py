# SPDX-License-Identifier: Apache-2.0
"""What a pass costs, known before it runs: multiplications, memory, a device's peak."""
