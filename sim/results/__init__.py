"""Scores, series and comparisons of simulation runs. Read first: `evaluation_metrics`."""
