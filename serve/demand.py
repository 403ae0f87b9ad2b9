"""What adapters are asked for: rates, loads and failures, from what replicas say with their heartbeats.

Rates age exponentially: a count halves in :data:`HALF_LIFE_S`, so that a steady stream of one a second adds
up to ``HALF_LIFE_S / ln 2``, and the rate is the sum divided by that. Nothing here grows with the number of
names that were ever asked for.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from policy.catalog import served_name
from policy.types import Beat, Replica, ReplicaState, Use, Wanted

HALF_LIFE_S = 60.0
# Versions that are remembered; who was asked for longest ago is forgotten first.
MAX_VERSIONS = 20_000
# So long the plan leaves a replica alone whose load failed; not for ever, for a disk may have been full.
REFUSING_S = 300.0
# Failures that are remembered of one replica.
MAX_FAILURES = 1024

Key = tuple[str, Wanted]


class Usage(NamedTuple):
    """How one version is used: requests per second ``rate``, the fraction of them that found it loaded.

    ``hit_rate`` is ``None`` before any request, ``loads`` counts those of all replicas, ``load_s`` is how
    long one took on average, ``None`` before any, ``last_used`` the instant of the last request.
    """

    rate: float = 0.0
    hit_rate: float | None = None
    loads: int = 0
    load_s: float | None = None
    last_used: float | None = None


class Failure(NamedTuple):
    """Why a replica could not load a version, and when it said so."""

    reason: str
    at: float


class _Counts:
    """The counts of one version as they were at ``at``."""

    __slots__ = ("at", "found", "last_used", "load_s", "loaded", "loads", "requests")

    def __init__(self, at: float) -> None:
        self.at = at
        self.requests = self.found = 0.0
        self.loaded = self.load_s = 0.0
        self.loads = 0
        self.last_used: float | None = None

    def age(self, at: float) -> None:
        left = 0.5 ** (max(0.0, at - self.at) / HALF_LIFE_S)
        self.requests *= left
        self.found *= left
        self.loaded *= left
        self.load_s *= left
        self.at = max(at, self.at)

    def add(self, use: Use, at: float) -> None:
        self.age(at)
        self.requests += use.requests
        self.found += min(use.found, use.requests)
        self.loaded += use.loads
        self.load_s += use.load_s
        self.loads += use.loads
        if use.requests:
            self.last_used = at

    def rate(self, at: float) -> float:
        left = 0.5 ** (max(0.0, at - self.at) / HALF_LIFE_S)
        return self.requests * left * math.log(2) / HALF_LIFE_S


class Demand:
    """What was asked for lately; each call is given the instant ``at``, in seconds, which never goes back."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Key, _Counts] = OrderedDict()
        self._failures: dict[str, dict[Wanted, Failure]] = {}
        self._incarnations: dict[str, int] = {}

    def note(self, beat: Beat, at: float) -> None:
        """Take what a replica did since it last said so."""
        replica = beat.replica
        for use in beat.uses:
            self._count((replica.model, Wanted(name=use.name, digest=use.digest)), use, at)
        if replica.state is ReplicaState.STOPPED:
            self._forget(replica.id)
            return
        if self._incarnations.get(replica.id) != replica.incarnation:
            # Another engine: what the one before it could not do says nothing of it.
            self._forget(replica.id)
            self._incarnations[replica.id] = replica.incarnation
        self._judge(replica, beat.uses, at)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget what replicas did that are none of these."""
        for gone in self._incarnations.keys() - set(replicas):
            self._forget(gone)

    def usage(self, model: str, wanted: Wanted, at: float) -> Usage:
        """How the version is used."""
        counts = self._counts.get((model, wanted))
        if counts is None:
            return Usage()
        return Usage(
            rate=counts.rate(at),
            hit_rate=counts.found / counts.requests if counts.requests else None,
            loads=counts.loads,
            load_s=counts.load_s / counts.loaded if counts.loaded else None,
            last_used=counts.last_used,
        )

    def rates(self, model: str, at: float) -> dict[Wanted, float]:
        """Requests per second of each version of ``model`` that is remembered."""
        return {wanted: c.rate(at) for (of, wanted), c in self._counts.items() if of == model}

    def failures(self, wanted: Wanted) -> dict[str, Failure]:
        """By replica, why it has not loaded the version when it last tried."""
        found = ((replica, failed.get(wanted)) for replica, failed in self._failures.items())
        return {replica: failure for replica, failure in found if failure is not None}

    def refusing(self, replica: str, at: float) -> frozenset[Wanted]:
        """The versions that ``replica`` could not load less than :data:`REFUSING_S` ago."""
        failed = self._failures.get(replica, {})
        return frozenset(wanted for wanted, failure in failed.items() if at - failure.at < REFUSING_S)

    def _count(self, key: Key, use: Use, at: float) -> None:
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = _Counts(at)
            if len(self._counts) > MAX_VERSIONS:
                self._counts.popitem(last=False)
        counts.add(use, at)
        if use.requests:
            self._counts.move_to_end(key)

    def _judge(self, replica: Replica, uses: tuple[Use, ...], at: float) -> None:
        failed = self._failures.setdefault(replica.id, {})
        for use in uses:
            wanted = Wanted(name=use.name, digest=use.digest)
            if use.failed:
                failed.pop(wanted, None)
                failed[wanted] = Failure(use.failed, at)
                if len(failed) > MAX_FAILURES:
                    del failed[next(iter(failed))]
            elif use.loads:
                failed.pop(wanted, None)
        loaded = set(replica.adapters) if failed else set()
        for wanted in [w for w in failed if served_name(w.name, w.digest) in loaded]:
            del failed[wanted]

    def _forget(self, replica: str) -> None:
        self._failures.pop(replica, None)
        self._incarnations.pop(replica, None)
