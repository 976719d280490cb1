"""Tests of the tasks floor."""
