"""Targets, registry and observed state of all replicas. Read first: `desired_state`."""
