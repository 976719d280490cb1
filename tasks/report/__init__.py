# SPDX-License-Identifier: Apache-2.0
"""What people look at: the page of a run, the page of two, and their parts."""
