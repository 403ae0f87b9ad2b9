"""Parsing of the deployment file: validation, cross-checks and the difference of two files.

Read first: `parse`.
"""
