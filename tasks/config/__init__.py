# SPDX-License-Identifier: Apache-2.0
"""The whole YAML: a file is named like its key."""
