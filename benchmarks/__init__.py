# SPDX-License-Identifier: Apache-2.0
"""What the docs measure: speed, memory, learning and recovery, each table by one command."""

import flows  # noqa: F401  its switches: a benchmark calls nobody, and collects garbage as the driver does
