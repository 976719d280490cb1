# SPDX-License-Identifier: Apache-2.0
"""The command line: what is refused in a sentence, and how a command ends."""
