"""Commands for a running deployment's models, replicas and adapters. Read first: `status`."""
