"""Scaling policies: each proposes a replica count from a view of one model.

Read first: `registry`.
"""
