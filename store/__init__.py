"""Persistence: the state directory, secrets, prepared models, adapters, the database. Read first: `state_dir`."""
