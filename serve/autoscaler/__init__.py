"""Scaling rounds: situations in, decisions out, logged and carried out. Read first: `autoscaler`."""
