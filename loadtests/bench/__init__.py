"""Benchmark of the gateway, side by side with other gateways.

Read first: `gateway`.
"""
