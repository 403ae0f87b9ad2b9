"""The adapter catalog: names, their versions, and the tenants that may see them.

A name is an alias: a request gets one of its versions by weight, the same for the same client, and keeps it
when the alias changes. Engines know a version by a name with its digest, so caches of versions never mix.
"""

from __future__ import annotations

import re

import msgspec

from policy.hashing import rendezvous

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
# Hexadecimal digits of a digest that names carry, and the fewest by which a client may pin one.
DIGITS = 12


class CatalogVersion(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable version of an adapter.

    ``number`` counts from 1 (displayed as ``v1``), ``digest`` is the SHA-256 of its content in hex, ``size``
    in bytes, ``source`` its origin, ``at`` the instant of its admission.
    """

    number: int
    digest: str
    rank: int
    size: int
    source: str
    at: float


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """A name on a base ``model``, and its versions in use: ``split``, (number, weight) of some ``versions``.

    ``revision`` grows with each change. ``tenants`` are those who may see it, all if there are none.
    """

    model: str
    name: str
    revision: int
    versions: tuple[CatalogVersion, ...]
    split: tuple[tuple[int, float], ...]
    tenants: tuple[str, ...] = ()
    at: float = 0.0

    @property
    def shares(self) -> dict[int, float]:
        """The share of requests (0..1) of each version in the split, by its number."""
        total = sum(weight for _, weight in self.split) or 1.0
        return {number: weight / total for number, weight in self.split}

    def version(self, number: int) -> CatalogVersion | None:
        return next((version for version in self.versions if version.number == number), None)

    def pick(self, key: int) -> CatalogVersion:
        """The version for the client with the 64-bit ``key``, by weighted rendezvous hashing."""
        kept = [(self.version(number), weight) for number, weight in self.split if weight > 0]
        found = [(version, weight) for version, weight in kept if version is not None]
        if len(found) == 1:
            return found[0][0]
        return max(found, key=lambda pair: rendezvous(key, int(pair[0].digest[:16], 16), pair[1]))[0]

    def pinned(self, digest: str) -> CatalogVersion | None:
        """The version whose digest begins so, of at least :data:`DIGITS` digits."""
        if len(digest) < DIGITS:
            return None
        return next((version for version in self.versions if version.digest.startswith(digest)), None)


class CatalogSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All aliases at one instant; ``term``, ``epoch`` and ``version`` as in
    :class:`policy.types.FleetSnapshot`.
    """

    epoch: float
    version: int
    aliases: tuple[Alias, ...] = ()
    term: int = 0


def served_name(name: str, digest: str) -> str:
    """The name of a version in engines and answers: ``NAME@DIGEST``, the digest shortened."""
    return f"{name}@{digest[:DIGITS]}"
