# SPDX-License-Identifier: Apache-2.0
"""One run: what is open, what is known, what comes next."""
