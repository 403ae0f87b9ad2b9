"""Readers of published and captured traces.

Read first: `open`.
"""
