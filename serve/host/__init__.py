"""Replica hosts: processes that own a replica and supervise its engine. Read first: `replica_host`."""
