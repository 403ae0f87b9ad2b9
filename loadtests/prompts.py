"""Prompts of about a given length that no prefix cache has seen."""

from __future__ import annotations

import random

# Short common words, one token each in the usual vocabularies.
_WORDS = (  # noqa: SIM905 - a text of words is easier to read than a list
    "time year day man world life hand part child eye place work week case point home water room "
    "mother area money story fact month lot right study book word issue side kind head house friend "
    "father power hour game line end member law car city name team minute idea body back parent face "
    "door health art war party result change morning reason girl guy moment air force tide gate"
).split()
_ASK = "Write a long story with these words:"
_ASK_TOKENS = 8


def prompt(tokens: int, rng: random.Random) -> str:
    """A prompt of about ``tokens`` tokens; what the server counted is in the usage it reports."""
    # The first word differs as well: a cached prefix would make the time to the first token look short.
    return " ".join(
        [f"({rng.getrandbits(32):x})", _ASK, *rng.choices(_WORDS, k=max(1, tokens - _ASK_TOKENS))]
    )
