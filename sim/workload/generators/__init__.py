"""Generators."""
