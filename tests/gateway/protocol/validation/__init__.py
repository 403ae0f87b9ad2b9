"""Tests of what a body may hold."""
