"""Drives live replicas to learn how fast they are, and holds the twin against what was recorded of them."""
