"""Benchmarks in the simulator: policies, modes and adapter placement. Read first: `mode_switching`."""
