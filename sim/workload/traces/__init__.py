"""Readers of published and captured traces. Read first: `detect_format`."""
