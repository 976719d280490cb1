# SPDX-License-Identifier: Apache-2.0
"""Inputs that no one should give, and what becomes of each: `python -m benchmarks.bad_inputs`.

Configs, files, requests and names are damaged by a seed, given to the code as a user would give them, and the outcome
is judged by an oracle that knows what was written. docs/security.md has the counts.
"""
