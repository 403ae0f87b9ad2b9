"""Synthetic prompts with the lengths and shared prefixes of a trace, reproducible by seed."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import NamedTuple

import xxhash

from policy.wire.capture import BLOCK_TOKENS
from sim.arrivals import Arrival

# Words of at most five letters: with the space before it, each is one token in common vocabularies.
_WORDS = (  # noqa: SIM905 - a text of words is easier to read than a list
    "time year day man world life hand part child eye place work week case point home "
    "water room area money story fact month lot right study book word issue side kind head "
    "house power hour game line end law car city name team idea body back face door "
    "art war party night girl guy force tide gate sea boat wave moon sand salt wind"
).split()
_BITS = 6
assert len(_WORDS) == 1 << _BITS
# The first words of a piece spell its number: 60 of its 64 bits.
_NUMBER_WORDS = 10
_RING = 1 << 16
_PIECES = 4096


class TokensPerWordFit(NamedTuple):
    """The tokens that an endpoint counts: ``overhead + per_word * words``."""

    overhead: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: float) -> int:
        """The words for about ``tokens`` tokens, without the overhead."""
        return round(tokens / self.per_word)


class PromptGenerator:
    """The prompts of one replay. Prompts of another ``seed`` differ from the first word on.

    A prefix cache from an earlier replay therefore has no effect, and blocks and requests share only the
    prefixes that the trace gives them.
    """

    def __init__(self, seed: int, fit: TokensPerWordFit | None = None) -> None:
        self.fit = fit or TokensPerWordFit()
        self._seed = seed
        rng = random.Random(seed)  # noqa: S311 - a reproducible workload
        words = rng.choices(_WORDS, k=_RING + BLOCK_TOKENS)
        self._ring = " ".join(words)
        self._starts = [0]
        for word in words:
            self._starts.append(self._starts[-1] + len(word) + 1)
        self._cached_piece = lru_cache(maxsize=_PIECES)(self._piece)

    def text(self, arrival: Arrival, number: int) -> str:
        """The prompt of the request with this ``number``."""
        left = self.fit.words(max(arrival.input_tokens - self.fit.overhead, 1.0)) or 1
        step = self.fit.words(BLOCK_TOKENS) or 1
        pieces = []
        for block in arrival.blocks:
            words = min(step, left)
            if words:
                pieces.append(self._cut(self._number("block", block), words))
            left -= words
        part = 0
        while left > 0:
            words = min(BLOCK_TOKENS, left)
            pieces.append(self._piece(self._number(f"own {part}", number), words))
            left -= words
            part += 1
        return " ".join(pieces)

    def _cut(self, number: int, words: int) -> str:
        """The first words of a block; fewer words are a prefix of more."""
        return " ".join(
            self._cached_piece(
                xxhash.xxh3_64_intdigest(f"{number} {at}".encode()), min(BLOCK_TOKENS, words - at)
            )
            for at in range(0, words, BLOCK_TOKENS)
        )

    def _number(self, kind: str, value: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._seed} {kind} {value}".encode())

    def _piece(self, number: int, words: int) -> str:
        """At most :data:`BLOCK_TOKENS` words; fewer are a prefix of more."""
        number_words = [_WORDS[number >> _BITS * at & 63] for at in range(min(words, _NUMBER_WORDS))]
        if words <= _NUMBER_WORDS:
            return " ".join(number_words)
        start = number % _RING
        end = self._starts[start + words - _NUMBER_WORDS] - 1
        return f"{' '.join(number_words)} {self._ring[self._starts[start] : end]}"
