"""Policies: how many replicas a model needs, each in one file."""
