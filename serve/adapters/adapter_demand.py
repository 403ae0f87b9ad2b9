"""Adapter demand: request rates, loads and failures, from the heartbeats of replicas.

Counts decay exponentially (:class:`policy.stats.decay.DecayingCount`). Memory is bounded, whatever the number
of names that were ever requested.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from policy.adapter_placement.slots import HALF_LIFE_S
from policy.stats.decay import DecayingCount
from policy.types import Replica, ReplicaPhase
from policy.wire.adapter_catalog import served_name
from policy.wire.heartbeat import AdapterRef, AdapterUse, Heartbeat

# A rise counts once this many recent requests show it; fewer may be chance.
QUICK_HALF_LIFE_S = 10.0
QUICK_AT_LEAST = 8.0
# Versions with counts; beyond that the one requested longest ago is dropped.
MAX_VERSIONS = 20_000
# How long a version is not planned on a replica that failed to load it. The cause may be temporary.
REFUSING_S = 300.0
# How much longer the failure is shown: until the next plan, load and heartbeat can confirm or clear it.
AGAIN_S = 60.0
# Engines report waiting requests every second; a report is valid for a little longer.
WAITS_S = 2.5
# Maximum failures kept of one replica.
MAX_FAILURES = 1024
MAX_REASON = 500

Key = tuple[str, AdapterRef]


class VersionUsage(NamedTuple):
    """The usage of one version: ``rate`` in requests per second; ``rising`` is the rate of a rise, else 0.

    ``hit_rate`` is the fraction of requests that found it loaded, ``loads`` counts the loads of all replicas,
    ``load_s`` is their mean duration, ``service_s`` the mean time that a request used it, ``last_used`` the
    instant of the last request; ``None`` before the first. ``waiting`` requests wait for a slot.
    """

    rate: float = 0.0
    rising: float = 0.0
    hit_rate: float | None = None
    loads: int = 0
    load_s: float | None = None
    service_s: float | None = None
    last_used: float | None = None
    waiting: int = 0


class ReportedLoadFailure(NamedTuple):
    """The reason why a replica could not load a version, and when it was reported."""

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

    def usage(self, at: float, waiting: int) -> VersionUsage:
        requests, loaded, busy_s = (count.count(at) for count in (self._requests, self._loaded, self._busy_s))
        rate, quick = self._requests.rate(at), self._quick.rate(at)
        return VersionUsage(
            rate=rate,
            rising=quick if quick > rate and self._quick.count(at) >= QUICK_AT_LEAST else 0.0,
            hit_rate=self._found.count(at) / requests if requests else None,
            loads=self.loads,
            load_s=self._load_s.count(at) / loaded if loaded else None,
            service_s=busy_s / requests if requests and busy_s else None,
            last_used=self.last_used,
            waiting=waiting,
        )


@dataclass(slots=True)
class _EngineReports:
    """The failures of the engine of a replica, oldest first, and its waiting requests with their instants."""

    incarnation: int
    failures: dict[AdapterRef, ReportedLoadFailure] = field(default_factory=dict)
    waiting: dict[AdapterRef, tuple[int, float]] = field(default_factory=dict)

    def note(self, replica: Replica, uses: Mapping[AdapterRef, AdapterUse], at: float) -> None:
        waiting = self.waiting | {ref: (use.waiting, at) for ref, use in uses.items()}
        self.waiting = {
            ref: (count, since) for ref, (count, since) in waiting.items() if count and at - since < WAITS_S
        }
        failed = self.failures
        while failed and at - next(iter(failed.values())).at >= REFUSING_S + AGAIN_S:
            del failed[next(iter(failed))]
        for ref, use in uses.items():
            if use.failed or use.loads:
                failed.pop(ref, None)
            if use.failed:
                failed[ref] = ReportedLoadFailure(use.failed[:MAX_REASON], at)
                if len(failed) > MAX_FAILURES:
                    del failed[next(iter(failed))]
        # A report of a load may be lost, but the loaded adapters are in every heartbeat.
        loaded = set(replica.adapters) if failed else set()
        for ref in [each for each in failed if served_name(each.name, each.digest) in loaded]:
            del failed[ref]


class AdapterDemandTracker:
    """Recent demand of all versions. Each call gets the instant ``at`` in seconds, which never goes back."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Key, _Counts] = OrderedDict()
        self._reports: dict[str, _EngineReports] = {}

    def note(self, beat: Heartbeat, at: float) -> None:
        """Add the heartbeat of a replica."""
        replica = beat.replica
        uses = {AdapterRef(name=use.name, digest=use.digest): use for use in beat.uses}
        for ref, use in uses.items():
            self._count((replica.model, ref), use, at)
        if replica.state is ReplicaPhase.STOPPED:
            self._reports.pop(replica.id, None)
            return
        reports = self._reports.get(replica.id)
        if reports is None or reports.incarnation != replica.incarnation:
            # A new engine: failures of the one before do not apply to it.
            reports = self._reports[replica.id] = _EngineReports(replica.incarnation)
        reports.note(replica, uses, at)

    def keep(self, replicas: Collection[str]) -> None:
        """Drop the state of all replicas but these."""
        self._reports = {name: reports for name, reports in self._reports.items() if name in replicas}

    def usage(self, model: str, wanted: AdapterRef, at: float) -> VersionUsage:
        """The usage of the version."""
        counts = self._counts.get((model, wanted))
        if counts is None:
            return VersionUsage()
        waiting = [reports.waiting[wanted] for reports in self._reports.values() if wanted in reports.waiting]
        return counts.usage(at, sum(count for count, since in waiting if at - since < WAITS_S))

    def failures(self, wanted: AdapterRef) -> dict[str, ReportedLoadFailure]:
        """Recent failures to load the version, by replica."""
        reports = self._reports.items()
        return {name: each.failures[wanted] for name, each in reports if wanted in each.failures}

    def refusing(self, replica: str, at: float) -> frozenset[AdapterRef]:
        """The versions that ``replica`` failed to load less than :data:`REFUSING_S` ago."""
        failed = self._reports[replica].failures if replica in self._reports else {}
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
