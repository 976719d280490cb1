# SPDX-License-Identifier: Apache-2.0
"""Prompts, pairs, embeddings and base weights: from raw files to what a run reads, and what is damaged."""
