# SPDX-License-Identifier: Apache-2.0
"""What passes between rollout and update."""
