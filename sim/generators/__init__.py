"""Workloads that are made up: when requests come, how long they are, and what they share."""
