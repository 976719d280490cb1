# SPDX-License-Identifier: Apache-2.0
"""What the pages say is true: guides, numbers, links, examples and the map of the files."""
