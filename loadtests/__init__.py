"""Loadtests."""
