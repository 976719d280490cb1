# SPDX-License-Identifier: Apache-2.0
"""Every family against its own diffusers pipeline."""
