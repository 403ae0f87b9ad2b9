"""Scores, series and comparisons of simulation runs. Read first: `score`."""
