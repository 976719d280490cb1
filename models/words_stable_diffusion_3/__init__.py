# SPDX-License-Identifier: Apache-2.0
"""A model of Stable Diffusion 3's architecture that one GPU pre-trains from nothing in minutes: it writes a word."""
