"""The status of adapters: versions, placement and usage."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from policy.types import Replica, ReplicaPhase
from policy.wire.catalog import Alias, Version, served_name
from policy.wire.heartbeat import AdapterRef
from serve.adapters.adapter_demand import AdapterDemand
from serve.adapters.placement import AdapterPlacement


class AdapterState(StrEnum):
    """``READY`` can be loaded, ``PARTIAL`` was refused by some replicas, ``FAILED`` by all.

    ``FETCHING`` adapters are being imported. Whether an adapter is loaded at the moment does not matter:
    replicas load and unload on demand.
    """

    READY = "ready"
    PARTIAL = "partial"
    FAILED = "failed"
    FETCHING = "fetching"


class RefusedBy(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that could not load a version, with its reason, reported ``at``."""

    replica: str
    reason: str
    at: float


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One version: its record, its ``share`` of the name's requests (0..1), its placement and usage.

    ``served`` is its serving name. ``loaded`` and ``planned`` are ids of replicas, ``why`` the reason of the
    plan. ``load_s`` is the mean duration of a load, ``hit_rate`` the fraction of requests that found it
    loaded; ``None`` before the first.
    """

    number: int
    digest: str
    served: str
    rank: int
    size: int
    source: str
    at: float
    share: float
    loaded: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    why: str = ""
    refused: tuple[RefusedBy, ...] = ()
    requests_per_s: float = 0.0
    hit_rate: float | None = None
    last_used: float | None = None
    loads: int = 0
    load_s: float | None = None


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One name on a base model; ``note`` explains its state, for example why it is missing."""

    model: str
    name: str
    state: AdapterState
    note: str = ""
    revision: int = 0
    tenants: tuple[str, ...] = ()
    split: tuple[tuple[int, float], ...] = ()
    versions: tuple[VersionStatus, ...] = ()
    requests_per_s: float = 0.0
    hit_rate: float | None = None
    last_used: float | None = None


class AdaptersStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All adapters at the instant ``at``, and the ``models`` with an `adapters` section."""

    at: float
    models: tuple[str, ...]
    adapters: tuple[AdapterStatus, ...] = ()


class AdapterOverview:
    """The ``replicas`` of one model and their planned adapters.

    ``at`` is now by the monotonic clock of the demand, ``wall`` the same instant in Unix seconds.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        demand: AdapterDemand,
        placing: AdapterPlacement,
        at: float,
        wall: float,
    ) -> None:
        gone = (ReplicaPhase.STOPPED, ReplicaPhase.ASLEEP)
        self._replicas = [replica for replica in replicas if replica.state not in gone]
        self._demand = demand
        self._placing = placing
        self._at = at
        self._ahead_s = wall - at

    def of(self, alias: Alias, note: str = "") -> AdapterStatus:
        """The status of ``alias``."""
        total = sum(weight for _, weight in alias.split) or 1.0
        shares = {number: weight / total for number, weight in alias.split}
        versions = tuple(self._version(alias, v, shares.get(v.number, 0.0)) for v in alias.versions)
        rate = sum(version.requests_per_s for version in versions)
        hits = sum(version.requests_per_s * (version.hit_rate or 0.0) for version in versions)
        return AdapterStatus(
            model=alias.model,
            name=alias.name,
            state=self._state([version for version in versions if version.share]),
            note=note,
            revision=alias.revision,
            tenants=alias.tenants,
            split=alias.split,
            versions=versions,
            requests_per_s=rate,
            hit_rate=hits / rate if rate else None,
            last_used=max((v.last_used for v in versions if v.last_used is not None), default=None),
        )

    def _version(self, alias: Alias, version: Version, share: float) -> VersionStatus:
        wanted = AdapterRef(name=alias.name, digest=version.digest)
        served = served_name(alias.name, version.digest)
        usage = self._demand.usage(alias.model, wanted, self._at)
        failures = self._demand.failures(wanted)
        ids = [replica.id for replica in self._replicas]
        holds = self._placing.holds
        planned = tuple(id_ for id_ in ids if wanted in holds.get(id_, ()))
        return VersionStatus(
            number=version.number,
            digest=version.digest,
            served=served,
            rank=version.rank,
            size=version.size,
            source=version.source,
            at=version.at,
            share=share,
            loaded=tuple(replica.id for replica in self._replicas if served in replica.adapters),
            planned=planned,
            # A version without demand is not in the plan.
            why=self._placing.why(alias.model, served) if planned or usage.rate else "",
            refused=tuple(
                RefusedBy(replica=id_, reason=failures[id_].reason, at=failures[id_].at + self._ahead_s)
                for id_ in ids
                if id_ in failures
            ),
            requests_per_s=usage.rate,
            hit_rate=usage.hit_rate,
            last_used=None if usage.last_used is None else usage.last_used + self._ahead_s,
            loads=usage.loads,
            load_s=usage.load_s,
        )

    def _state(self, versions: Sequence[VersionStatus]) -> AdapterState:
        """The state by refusals alone; a name whose versions differ is partial."""
        refusals = [len(version.refused) for version in versions]
        if not any(refusals):
            return AdapterState.READY
        all_refuse = all(count == len(self._replicas) for count in refusals)
        return AdapterState.FAILED if all_refuse else AdapterState.PARTIAL
