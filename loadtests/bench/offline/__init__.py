"""Offline."""
