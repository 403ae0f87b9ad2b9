"""What a plan of placement is made from, and what it says: replicas, demands, bounds, homes and moves."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Reason(StrEnum):
    """Why a version lives where it does, or does not."""

    KEPT = "lives there already"
    RESIDENT = "is loaded there already"
    CLAIMED = "claimed most by rendezvous"
    ALIKE = "beside others of its rank, where load is below the mean"
    BOUNDED = "its first choices have their share of the load, or no slot"
    LEAST = "the least loaded with a slot: elsewhere is more load than the bound, or no slot"
    EVENED = "to even the load"
    DISPLACED = "others are worth more"
    UNWANTED = "nobody asks for it any more"
    FEWER = "fewer homes are enough"
    NOWHERE = "no replica has a slot for it and could load it"
    ON_DEMAND = "loaded on demand: the slots are taken by what costs more to load again and again"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is ready or starting; ``key`` is the 64-bit hash by which gateways know it.

    ``slots`` is how many adapters it can have loaded, ``seats`` how many requests it runs at once (more than
    0), by which it is also weighed against others. ``resident`` are the versions loaded there, ``refused``
    those that it cannot load.
    """

    id: str
    key: int
    slots: int
    seats: float = 1.0
    resident: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What one version is asked for; ``name`` is its serving name, ``key`` any 64-bit hash of that.

    ``rate`` is in requests per second, ``forecast`` what that is expected to be when a load begun now is of
    use. A load takes ``load_s`` seconds, and a request stays ``service_s`` seconds in a seat (0: not known).
    ``waiting`` are requests that wait for a slot now.
    """

    name: str
    key: int
    rate: float
    forecast: float = 0.0
    load_s: float = 0.25
    service_s: float = 0.0
    waiting: int = 0
    rank: int = 0

    @property
    def expected(self) -> float:
        """Requests per second to make room for: those that come, or more if more are foreseen."""
        return max(self.rate, self.forecast)

    @property
    def value(self) -> float:
        """Seconds of loading per second that a slot for it saves."""
        return self.expected * self.load_s


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan keeps to. Durations are seconds.

    ``load`` is the most that a replica may be given, in units of the mean. One home is enough for requests
    that take the part ``busy`` of its seats; a version has ``copies`` homes at most (0: as many as there are
    replicas), one more each time that requests wait for a slot for ``waits_s``, one fewer after ``spare_s``
    in which fewer would have been enough. Between two moves of it pass ``move_s``. ``free`` slots of each
    replica at least are left to what is loaded on demand. Who has a slot keeps it until another is worth
    ``gain`` times as much.
    """

    load: float = 1.25
    busy: float = 0.5
    copies: int = 0
    waits_s: float = 10.0
    spare_s: float = 600.0
    move_s: float = 60.0
    free: int = 1
    gain: float = 1.25


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a version lives and ``why``; ``value`` as in :class:`Demand`.

    ``degree`` is how many homes it should have. Instants are ``None`` where nothing of the kind is so:
    ``moved_at`` when it last got another home or lost its only one, ``waits_since`` since when requests
    wait for a slot, ``spare_since`` since when fewer homes would do. One without ``hosts`` lost its slot
    lately, and gets none before it may move again.
    """

    name: str
    hosts: tuple[str, ...]
    value: float
    why: str
    degree: int = 1
    moved_at: float | None = None
    waits_since: float | None = None
    spare_since: float | None = None


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A change since the plan before; ``source`` is empty for a new home, ``target`` for one given up."""

    name: str
    source: str
    target: str
    why: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``homes`` in the order of value; ``hold`` is what each replica should keep, the most valuable first.

    ``load`` is what each is given of the requests for what lives somewhere, in units of its fair share, and
    ``free`` how many slots of each are left to what is loaded on demand.
    """

    at: float = 0.0
    homes: tuple[Assignment, ...] = ()
    hold: dict[str, tuple[str, ...]] = {}
    moves: tuple[Move, ...] = ()
    load: dict[str, float] = {}
    free: int = 0

    def explain(self, name: str) -> str:
        """Why the version ``name`` lives where it does."""
        found = next((home for home in self.homes if home.name == name), None)
        return found.why if found is not None else Reason.ON_DEMAND


EMPTY = Plan()
