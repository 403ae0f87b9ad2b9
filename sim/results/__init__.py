"""Scores, series and summaries of simulation runs.

Read first: `summary`.
"""
