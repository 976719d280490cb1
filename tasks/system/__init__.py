# SPDX-License-Identifier: Apache-2.0
"""This machine: files that are whole, folders' owners, processes, credentials."""
