"""Engines: child processes that turn requests into tokens behind the guard."""
