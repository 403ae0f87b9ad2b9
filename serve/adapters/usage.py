"""What adapters are asked for: rates, loads and failures, from what replicas say with their heartbeats.

Counts age exponentially: one halves in a half-life, so that a steady stream of one a second adds up to
``half-life / ln 2``, and the rate is the sum divided by that. Nothing here grows with the number of names
that were ever asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from policy.placement.slots import HALF_LIFE_S
from policy.stats.decay import DecayingCount
from policy.types import Replica, ReplicaPhase
from policy.wire.catalog import served_name
from policy.wire.heartbeat import AdapterRef, AdapterUse, Heartbeat

# A rise is believed once so many requests of the last seconds show it: fewer are as likely to be chance.
QUICK_HALF_LIFE_S = 10.0
QUICK_AT_LEAST = 8.0
# Versions that are remembered; who was asked for longest ago is forgotten first.
MAX_VERSIONS = 20_000
# So long the plan leaves a replica alone whose load failed; not for ever, for a disk may have been full.
REFUSING_S = 300.0
# So much longer it is told: the plan, the load and its heartbeat follow, and what fails again never was well.
AGAIN_S = 60.0
# An engine says every second who waits for a slot; what it said holds for a little longer.
WAITS_S = 2.5
# Failures that are remembered of one replica.
MAX_FAILURES = 1024
MAX_REASON = 500

Key = tuple[str, AdapterRef]


class Usage(NamedTuple):
    """How one version is used: ``rate`` in requests per second, and ``rising`` to what, 0 if it does not.

    ``hit_rate`` is the fraction of requests that found it loaded, ``loads`` counts those of all replicas,
    ``load_s`` is how long one took on average, ``service_s`` how long a request had it, ``last_used`` the
    instant of the last one; ``None`` where there was none. ``waiting`` are requests that wait for a slot.
    """

    rate: float = 0.0
    rising: float = 0.0
    hit_rate: float | None = None
    loads: int = 0
    load_s: float | None = None
    service_s: float | None = None
    last_used: float | None = None
    waiting: int = 0


class Failure(NamedTuple):
    """Why a replica could not load a version, and when it said so."""

    reason: str
    at: float


class _Counts:
    """The counts of one version."""

    __slots__ = ("_busy_s", "_found", "_load_s", "_loaded", "_quick", "_requests", "last_used", "loads")

    def __init__(self, at: float) -> None:
        self._requests, self._found, self._loaded, self._load_s, self._busy_s = (
            DecayingCount(HALF_LIFE_S, at) for _ in range(5)
        )
        self._quick = DecayingCount(QUICK_HALF_LIFE_S, at)
        self.loads = 0
        self.last_used: float | None = None

    def add(self, use: AdapterUse, at: float) -> None:
        self._requests.add(at, use.requests)
        self._quick.add(at, use.requests)
        self._found.add(at, min(use.found, use.requests))
        self._loaded.add(at, use.loads)
        self._load_s.add(at, use.load_s)
        self._busy_s.add(at, use.busy_s)
        self.loads += use.loads
        if use.requests:
            self.last_used = at

    def usage(self, at: float, waiting: int) -> Usage:
        requests, loaded, busy_s = (count.count(at) for count in (self._requests, self._loaded, self._busy_s))
        rate, quick = self._requests.rate(at), self._quick.rate(at)
        return Usage(
            rate=rate,
            rising=quick if quick > rate and self._quick.count(at) >= QUICK_AT_LEAST else 0.0,
            hit_rate=self._found.count(at) / requests if requests else None,
            loads=self.loads,
            load_s=self._load_s.count(at) / loaded if loaded else None,
            service_s=busy_s / requests if requests and busy_s else None,
            last_used=self.last_used,
            waiting=waiting,
        )


class AdapterDemand:
    """What was asked for lately; each call is given the instant ``at``, in seconds, which never goes back."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Key, _Counts] = OrderedDict()
        self._failures: dict[str, dict[AdapterRef, Failure]] = {}
        self._waiting: dict[str, dict[AdapterRef, tuple[int, float]]] = {}
        self._incarnations: dict[str, int] = {}

    def note(self, beat: Heartbeat, at: float) -> None:
        """Take what a replica did since it last said so."""
        replica = beat.replica
        uses = {AdapterRef(name=use.name, digest=use.digest): use for use in beat.uses}
        for wanted, use in uses.items():
            self._count((replica.model, wanted), use, at)
        if replica.state is ReplicaPhase.STOPPED:
            self._forget(replica.id)
            return
        if self._incarnations.get(replica.id) != replica.incarnation:
            # Another engine: what the one before it could not do says nothing of it.
            self._forget(replica.id)
            self._incarnations[replica.id] = replica.incarnation
        waiting = self._waiting.setdefault(replica.id, {})
        waiting |= {wanted: (use.waiting, at) for wanted, use in uses.items()}
        self._waiting[replica.id] = {
            w: said for w, said in waiting.items() if said[0] and at - said[1] < WAITS_S
        }
        self._judge(replica, uses, at)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget what replicas did that are none of these."""
        for gone in self._incarnations.keys() - set(replicas):
            self._forget(gone)

    def usage(self, model: str, wanted: AdapterRef, at: float) -> Usage:
        """How the version is used."""
        counts = self._counts.get((model, wanted))
        if counts is None:
            return Usage()
        said = [waiting[wanted] for waiting in self._waiting.values() if wanted in waiting]
        return counts.usage(at, sum(count for count, since in said if at - since < WAITS_S))

    def failures(self, wanted: AdapterRef) -> dict[str, Failure]:
        """By replica, why it could not load the version when it last tried, which was not long ago."""
        found = ((replica, failed.get(wanted)) for replica, failed in self._failures.items())
        return {replica: failure for replica, failure in found if failure is not None}

    def refusing(self, replica: str, at: float) -> frozenset[AdapterRef]:
        """The versions that ``replica`` could not load less than :data:`REFUSING_S` ago."""
        failed = self._failures.get(replica, {})
        return frozenset(wanted for wanted, failure in failed.items() if at - failure.at < REFUSING_S)

    def _count(self, key: Key, use: AdapterUse, at: float) -> None:
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = _Counts(at)
            if len(self._counts) > MAX_VERSIONS:
                self._counts.popitem(last=False)
        counts.add(use, at)
        if use.requests:
            self._counts.move_to_end(key)

    def _judge(self, replica: Replica, uses: Mapping[AdapterRef, AdapterUse], at: float) -> None:
        failed = self._failures.setdefault(replica.id, {})
        # The first is the oldest.
        while failed and at - next(iter(failed.values())).at >= REFUSING_S + AGAIN_S:
            del failed[next(iter(failed))]
        for wanted, use in uses.items():
            if use.failed:
                failed.pop(wanted, None)
                failed[wanted] = Failure(use.failed[:MAX_REASON], at)
                if len(failed) > MAX_FAILURES:
                    del failed[next(iter(failed))]
            elif use.loads:
                failed.pop(wanted, None)
        # What it said of a load may be lost; that it has loaded it is said again and again.
        loaded = set(replica.adapters) if failed else set()
        for wanted in [each for each in failed if served_name(each.name, each.digest) in loaded]:
            del failed[wanted]

    def _forget(self, replica: str) -> None:
        self._failures.pop(replica, None)
        self._waiting.pop(replica, None)
        self._incarnations.pop(replica, None)
