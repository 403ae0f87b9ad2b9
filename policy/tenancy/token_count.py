"""Tokens of a request that count against a limit: the most it may use at first, then what it used."""

from __future__ import annotations

import math


def most_tokens(prompt: int, allowed: int, context: int | None, choices: int) -> int:
    """Prompt and allowed answer: what a request reserves.

    ``allowed`` are the tokens of all answers that the client allows (0: as many as the model's ``context``
    has left for each of ``choices``, which engines give at most in any case).
    """
    left = max(0, (context or 0) - prompt) * choices
    return prompt + (min(allowed, left) if allowed and context else allowed or left)


def cached_weight(prompt_price: float, cached_price: float) -> float:
    """What a prompt token from the cache counts: its price as a part of that of others, 1 without prices."""
    return min(1.0, cached_price / prompt_price) if prompt_price > 0.0 else 1.0


def used_tokens(prompt: int, cached: int, output: int, weight: float) -> int:
    """Prompt and answer, of the prompt the ``cached`` tokens by their ``weight``."""
    return prompt + output - (0 if weight == 1.0 else math.floor(cached * (1.0 - weight)))
