"""Tests of vLLM-Omni, in an environment of its own."""
