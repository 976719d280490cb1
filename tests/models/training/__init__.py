# SPDX-License-Identifier: Apache-2.0
"""The trainer against plain autograd, on one rank and on several."""
