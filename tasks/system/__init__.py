"""This machine: files that are whole, folders' owners, processes, credentials."""
