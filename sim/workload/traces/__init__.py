"""Traces."""
