# SPDX-License-Identifier: Apache-2.0
"""The Prefect tasks, one module a stage."""
