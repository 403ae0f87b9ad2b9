"""Benchmark of the gateway, side by side with other gateways.

Read first: `peer_comparison`.
"""
