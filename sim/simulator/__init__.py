"""The simulator: a trace replayed in virtual time with the production decisions. Read first: `run`."""
