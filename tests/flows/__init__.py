"""Tests of the flows and of the commands."""
