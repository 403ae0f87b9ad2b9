"""Formats and header names that two processes share.

Read first: `heartbeat`.
"""
