"""Tests of subscriptions to the events of KV caches."""
