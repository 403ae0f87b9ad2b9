"""Workloads: streams of arrivals from traces and generators. Read first: `workload_spec`."""
