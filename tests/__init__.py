"""Tests that mirror the source, a folder a floor."""
