"""Traces as they are published, and as the gateway captures them: read line by line."""
