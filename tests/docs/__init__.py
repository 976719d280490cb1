"""What the pages say is true: guides, numbers, links, examples and the map of the files."""
