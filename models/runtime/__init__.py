# SPDX-License-Identifier: Apache-2.0
"""How torch runs: compilation, determinism."""
