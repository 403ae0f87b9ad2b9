"""Autoscaler."""
