"""Replica hosts: processes that own a replica's resources and supervise its engine. Read first: `host`."""
