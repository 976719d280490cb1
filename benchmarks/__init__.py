# SPDX-License-Identifier: Apache-2.0
"""What the docs measure: speed, memory, learning and recovery, each table by one command."""
