"""Persistence: state directory, secrets, prepared models, adapters, database. Read first: `state_dir`."""
