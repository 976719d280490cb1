# SPDX-License-Identifier: Apache-2.0
"""The update: training engines, micro-batches, the policy under gradient."""
