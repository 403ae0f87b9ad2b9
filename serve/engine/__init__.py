"""Engines: child processes that generate tokens, each behind a guard. Read first: `interface`."""
