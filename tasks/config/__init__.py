"""The whole YAML: a file is named like its key."""
