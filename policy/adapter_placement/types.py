"""Types of a placement plan: replicas, demands, bounds, assignments and moves."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class PlacementReason(StrEnum):
    """The reason for an assignment, a move, or the absence of one."""

    KEPT = "is assigned there already"
    RESIDENT = "is loaded there already"
    CLAIMED = "first choice by rendezvous hashing"
    ALIKE = "with others of its rank, where load is below the mean"
    BOUNDED = "its first choices have their share of the load, or no slot"
    LEAST = "the least loaded with a slot: elsewhere is more load than the bound, or no slot"
    EVENED = "to even the load"
    DISPLACED = "others have a higher value"
    UNWANTED = "not requested any more"
    FEWER = "fewer replicas are enough"
    NOWHERE = "no replica has a slot for it and could load it"
    ON_DEMAND = "loaded on demand: the slots are taken by what costs more to load again and again"


class PlacementHost(msgspec.Struct, frozen=True, kw_only=True):
    """A ready or starting replica; ``key`` is its 64-bit hash for rendezvous hashing.

    ``slots`` is its number of adapter slots, ``seats`` its maximum number of concurrent requests (more than
    0) and its weight. ``resident`` are the loaded versions, ``refused`` those that it cannot load.
    """

    id: str
    key: int
    slots: int
    seats: float = 1.0
    resident: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()


class VersionDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The demand for one version; ``name`` is its serving name, ``key`` a 64-bit hash of it.

    ``rate`` is in requests per second, ``forecast`` the rate expected once a load that starts now is done. A
    load takes ``load_s`` seconds, a request occupies a seat for ``service_s`` seconds (0: unknown).
    ``waiting`` requests wait for a slot now.
    """

    name: str
    key: int
    rank: int = 0
    waiting: int = 0
    rate: float
    forecast: float = 0.0
    load_s: float = 0.25
    service_s: float = 0.0

    @property
    def expected(self) -> float:
        """Requests per second to plan for: the higher of rate and forecast."""
        return max(self.rate, self.forecast)

    @property
    def value(self) -> float:
        """Seconds of loading per second that a slot saves."""
        return self.expected * self.load_s


class PlacementParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a plan. Durations are seconds.

    ``load`` is the load bound of a replica, in units of the mean. A version gets one more replica for each
    fraction ``busy`` of a replica's seats that its requests occupy, at most ``copies`` (0: all replicas). It
    gets another one each time that requests wait for a slot for ``waits_s``, and loses one after ``spare_s``
    in which fewer would have been enough. At least ``move_s`` pass between two moves of a version. At least
    ``free`` slots of each replica are reserved for loads on demand. A version loses its slot only to one with
    ``gain`` times its value.
    """

    load: float = 1.25
    busy: float = 0.5
    copies: int = 0
    waits_s: float = 10.0
    spare_s: float = 600.0
    move_s: float = 60.0
    free: int = 1
    gain: float = 1.25


class AdapterAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas (``hosts``) of a version and the reason ``why``; ``value`` as in :class:`VersionDemand`.

    ``degree`` is the desired number of replicas. ``moved_at`` is the instant of the last move,
    ``waits_since`` since when requests wait for a slot, ``spare_since`` since when fewer replicas would be
    enough; ``None`` if not so. A version without ``hosts`` lost its slot and gets none before it may move
    again.
    """

    name: str
    hosts: tuple[str, ...]
    degree: int = 1
    value: float
    why: str
    moved_at: float | None = None
    waits_since: float | None = None
    spare_since: float | None = None


class PlacementMove(msgspec.Struct, frozen=True, kw_only=True):
    """A change since the last plan; ``source`` is empty for a new replica, ``target`` for a removed one."""

    name: str
    source: str
    target: str
    why: str


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The assignments ``homes`` by value, and the same by replica: ``hold``, the most valuable first.

    ``load`` is the load of each replica from planned versions, in units of its fair share; ``free`` the slots
    of each replica that are reserved for loads on demand.
    """

    at: float = 0.0
    homes: tuple[AdapterAssignment, ...] = ()
    hold: dict[str, tuple[str, ...]] = {}
    moves: tuple[PlacementMove, ...] = ()
    load: dict[str, float] = {}
    free: int = 0

    def explain(self, name: str) -> str:
        found = next((home for home in self.homes if home.name == name), None)
        return found.why if found is not None else PlacementReason.ON_DEMAND


EMPTY = PlacementPlan()
