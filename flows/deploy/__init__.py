"""Servers and deployments: machines, not runs."""
