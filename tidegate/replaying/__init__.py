"""Replays traces against an endpoint in an open loop, and captures what a gateway serves."""
