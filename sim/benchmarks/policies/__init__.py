"""Scaling policies compared with the offline optimum on traces. Read first: `run`."""
