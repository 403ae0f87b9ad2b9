"""A prefill whose end nobody sees, and when it is taken to be over."""

from __future__ import annotations


class Ahead:
    """Prompt tokens that are taken to be computed at ``at``, an instant of loop time; 0 once they were."""

    __slots__ = ("at", "tokens")

    def __init__(self, tokens: int, at: float) -> None:
        self.tokens = tokens
        self.at = at
