"""Metrics of gateways and replicas, aggregated over windows with their ages.

Read first: `aggregator`.
"""
