"""Metrics, traces, access log and capture of what a gateway worker serves.

Read first: `metrics`.
"""
