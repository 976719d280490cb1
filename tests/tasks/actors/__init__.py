# SPDX-License-Identifier: Apache-2.0
"""The cluster, the workers and ranks on it, and what ends them: real Ray, real processes."""
