"""Tests of the lease and the state of elected controllers."""
