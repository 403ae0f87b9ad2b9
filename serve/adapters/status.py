"""The status of adapters: versions, placement and usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from policy.types import Replica, ReplicaPhase
from policy.wire.adapter_catalog import Alias, CatalogVersion, served_name
from policy.wire.heartbeat import AdapterRef
from serve.adapters.adapter_demand import AdapterDemandTracker
from serve.adapters.placement_loop import AdapterPlacementPlans


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


@dataclass(eq=False)
class AdapterStatusView:
    """The ``replicas`` of one model and their planned adapters.

    ``at`` is now by the monotonic clock of the demand, ``wall`` the same instant in Unix seconds.
    """

    replicas: Sequence[Replica]
    demand: AdapterDemandTracker
    placement: AdapterPlacementPlans
    at: float
    wall: float

    def __post_init__(self) -> None:
        gone = (ReplicaPhase.STOPPED, ReplicaPhase.ASLEEP)
        self.replicas = [replica for replica in self.replicas if replica.state not in gone]

    def of(self, alias: Alias, note: str = "") -> AdapterStatus:
        """The status of ``alias``."""
        shares = alias.shares
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

    def _version(self, alias: Alias, version: CatalogVersion, share: float) -> VersionStatus:
        wanted = AdapterRef(name=alias.name, digest=version.digest)
        served = served_name(alias.name, version.digest)
        usage = self.demand.usage(alias.model, wanted, self.at)
        failures, holds = self.demand.failures(wanted), self.placement.holds
        ids = [replica.id for replica in self.replicas]
        planned = tuple(replica for replica in ids if wanted in holds.get(replica, ()))
        ahead_s = self.wall - self.at
        return VersionStatus(
            **msgspec.structs.asdict(version),
            served=served,
            share=share,
            loaded=tuple(replica.id for replica in self.replicas if served in replica.adapters),
            planned=planned,
            # A version without demand is not in the plan.
            why=self.placement.why(alias.model, served) if planned or usage.rate else "",
            refused=tuple(
                RefusedBy(replica=name, reason=failures[name].reason, at=failures[name].at + ahead_s)
                for name in ids
                if name in failures
            ),
            requests_per_s=usage.rate,
            hit_rate=usage.hit_rate,
            last_used=None if usage.last_used is None else usage.last_used + ahead_s,
            loads=usage.loads,
            load_s=usage.load_s,
        )

    def _state(self, versions: Sequence[VersionStatus]) -> AdapterState:
        """The state by refusals alone; a name whose versions differ is partial."""
        refusals = [len(version.refused) for version in versions]
        if not any(refusals):
            return AdapterState.READY
        all_refuse = all(count == len(self.replicas) for count in refusals)
        return AdapterState.FAILED if all_refuse else AdapterState.PARTIAL
