"""A prefill whose end nobody sees, and when it is taken to be over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Ahead:
    """Prompt tokens that are taken to be computed at ``at``, an instant of loop time; 0 once they were."""

    tokens: int
    at: float
