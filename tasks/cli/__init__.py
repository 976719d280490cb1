# SPDX-License-Identifier: Apache-2.0
"""The command line: what a command takes, what it says of it, and how it ends."""
