"""Sections of the configuration that the models floor reads."""
