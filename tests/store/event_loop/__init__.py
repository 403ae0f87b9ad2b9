"""Tests of what a process with an event loop needs."""
