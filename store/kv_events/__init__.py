"""Subscriptions to the events of KV caches, for replicas and gateways. Read first: `subscriber`."""
