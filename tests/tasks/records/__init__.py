# SPDX-License-Identifier: Apache-2.0
"""What stays of a run: checkpoints, MLflow's record, registered versions, guards, lineage."""
