"""Targets of the fuzzer: what bytes from the network meet first. ``python -m tests.fuzz.run NAME``."""
