"""Targets, registry and observed state of all replicas.

Read first: `targets`.
"""
