# SPDX-License-Identifier: Apache-2.0
"""What the data stages make and a run reads."""
