# SPDX-License-Identifier: Apache-2.0
"""The stages: Prefect tasks, the Ray actors that serve them, and what both read and write."""
