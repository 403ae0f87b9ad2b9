"""Capacity planning: the fewest GPUs that meet the SLO, found by simulation. Read first: `plan`."""
