# SPDX-License-Identifier: Apache-2.0
"""From the reference system's scripts to a recipe: what each of their overrides is called here, or why it is not."""
