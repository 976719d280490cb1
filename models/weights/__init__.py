"""Weights on their way: what is trained, how it travels, whether it arrived."""
