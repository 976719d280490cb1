# SPDX-License-Identifier: Apache-2.0
"""The Prefect tasks of an iteration."""
