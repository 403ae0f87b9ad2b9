"""Adapter placement: a plan of which adapter version is kept on which replicas, computed every few seconds.

Slots go to the versions with the highest cost of reloading: requests per second times seconds of a load.
Each version is assigned to one replica, or to more if one cannot serve it: the first choices by weighted
rendezvous hashing, unless they have their share of the load (hashing with bounded loads: Mirrokni, Thorup and
Zadimoghaddam, 2018). Existing assignments stay, so a plan computed from its own result moves nothing.

:func:`plan` has five steps, which are methods of :class:`_Draft` in the same order.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec

from policy.adapter_placement.types import (
    AdapterAssignment,
    PlacementHost,
    PlacementMove,
    PlacementParameters,
    PlacementPlan,
    PlacementReason,
    VersionDemand,
)
from policy.hashing import rendezvous

# How often a plan is made, in seconds.
PLAN_PERIOD_S = 5.0
# The assignment of a version that had none.
NO_ASSIGNMENT = AdapterAssignment(name="", hosts=(), value=0.0, why="")
# A version that is given back: its requests per second, the length of its name, and the name.
_Return = tuple[float, int, str]
# The higher load per seat after an exchange, the length of the version back, version, target, version back.
_Exchange = tuple[float, int, str, str, str]
# Tolerated shortage of slots for loads on demand, and the margin required before their number falls.
SHORT, MARGIN = 0.25, 0.25


def plan(
    hosts: Iterable[PlacementHost],
    demands: Iterable[VersionDemand],
    last: PlacementPlan,
    at: float,
    bounds: PlacementParameters | None = None,
) -> PlacementPlan:
    """The plan at ``at`` (seconds) after ``last``; deterministic.

    Without replicas the last plan stays, for replicas that return.
    """
    listed = sorted((host for host in hosts if host.slots), key=lambda host: host.id)
    if not listed:
        return msgspec.structs.replace(last, at=at, moves=(), hold={}, load={})
    draft = _Draft(listed, last, at, bounds or PlacementParameters())
    chosen = draft.choose([demand for demand in demands if demand.expected > 0.0])
    for demand in chosen:
        draft.keep(demand)
    for demand in chosen:
        draft.settle(demand)
    draft.fill()
    draft.even()
    return draft.plan()


class _Draft:
    """A plan under construction: the steps of :func:`plan`, in their order."""

    def __init__(
        self, hosts: Sequence[PlacementHost], last: PlacementPlan, at: float, bounds: PlacementParameters
    ) -> None:
        self._hosts = {host.id: host for host in hosts}
        self._at, self._bounds, self._last = at, bounds, last
        self._before = {home.name: home for home in last.homes}
        self._room: dict[str, int] = {}
        self._load = dict.fromkeys(self._hosts, 0.0)
        self._seats = sum(host.seats for host in hosts)
        # Requests per second and seat: of all demand, and of the versions with slots.
        self._whole = self._fair = 0.0
        self._asked: set[str] = set()
        self._chosen: dict[str, VersionDemand] = {}
        self._homes: dict[str, AdapterAssignment] = {}
        # Of each replica: the versions assigned to it, and their largest rank before any was moved.
        self._held: dict[str, set[str]] = {host: set() for host in self._hosts}
        self._rank: dict[str, int] = {}
        self._left: list[VersionDemand] = []
        self._free = bounds.free

    def choose(self, demands: Sequence[VersionDemand]) -> list[VersionDemand]:
        """The demands that get slots, the most valuable first, with hysteresis for existing ones."""
        self._asked = {demand.name for demand in demands}
        # The exact sum, which the order of the demands cannot change.
        self._whole = math.fsum(demand.expected for demand in demands) / self._seats
        ordered = sorted(demands, key=self._worth)
        self._spare(ordered)
        room = sum(self._room.values())
        for demand in ordered:
            before = self._last_of(demand)
            if not before.hosts and self._rests(before):
                continue
            if room > 0:
                self._enter(demand)
                room -= self._homes[demand.name].degree
            else:
                self._left.append(demand)
        chosen = list(self._chosen.values())
        self._fair = sum(demand.expected for demand in chosen) / self._seats
        return chosen

    def _spare(self, ordered: Sequence[VersionDemand]) -> None:
        """Reserve slots for loads on demand: as many as those requests use at once, at most half.

        By Little's law that is their rate times the seconds that one occupies a slot, plus one standard
        deviation (its square root).
        """
        takes = [demand.expected * (demand.load_s + demand.service_s) for demand in ordered]
        slots = [host.slots for host in self._hosts.values()]
        for free in range(self._bounds.free, max(self._bounds.free, max(slots) // 2) + 1):
            held = sum(max(1, count - free) for count in slots)
            rest = sum(takes[held:]) / len(slots)
            self._free = free
            # The number falls only if the lower one is enough by a margin.
            margin = MARGIN if free < self._last.free else 0.0
            if rest + math.sqrt(rest) + margin <= free + SHORT:
                break
        self._room = {host.id: max(1, host.slots - self._free) for host in self._hosts.values()}

    def keep(self, demand: VersionDemand) -> None:
        """Keep its assignments, as far as there is room and as many are wanted."""
        home = self._homes[demand.name]
        stays = [host for host in self._last_of(demand).hosts if self._takes(host, demand)]
        for host in stays[: home.degree]:
            self._give(demand, host, PlacementReason.KEPT, home.moved_at)

    def settle(self, demand: VersionDemand) -> None:
        """Add the assignments that it lacks, if it may move or its replicas are gone."""
        while len(self._homes[demand.name].hosts) < self._homes[demand.name].degree:
            home = self._homes[demand.name]
            free = [host for host in self._hosts.values() if self._takes(host.id, demand)]
            could_stay = any(self._could(demand.name, host) for host in self._last_of(demand).hosts)
            if not free or ((home.hosts or could_stay) and self._rests(home)):
                return
            host, why = self._best(demand, free)
            self._give(demand, host.id, why, self._at if demand.name in self._before else None)

    def fill(self) -> None:
        """Give slots that are left to the next demands."""
        for demand in self._left:
            if not any(self._room.values()):
                return
            self._enter(demand)
            self.settle(demand)

    def even(self) -> None:
        """While a replica exceeds the load bound, move a version away or exchange it."""
        self._load = dict.fromkeys(self._hosts, 0.0)
        for home in self._homes.values():
            for host in home.hosts:
                self._load[host] += self._share(home.name)
        while True:
            most = max(self._hosts, key=lambda host: (self._per_seat(host), host))
            if self._per_seat(most) <= self._bounds.load * self._whole:
                return
            after, _, name, other, less = self._best_exchange(most)
            if after >= self._per_seat(most) * (1.0 - 1e-9):
                return
            self._move(name, most, other)
            if less:
                self._move(less, other, most)

    def plan(self) -> PlacementPlan:
        homes: list[AdapterAssignment] = []
        moves: list[PlacementMove] = []
        for home in sorted(self._homes.values(), key=lambda home: (-home.value, home.name)):
            had = self._before.get(home.name, NO_ASSIGNMENT).hosts
            left = [host for host in had if host not in home.hosts]
            came = [host for host in home.hosts if host not in had]
            for source, target in zip_longest(left, came, fillvalue=""):
                why = home.why if target else PlacementReason.FEWER
                moves.append(PlacementMove(name=home.name, source=source, target=target, why=why))
            homes.append(home)
        for before in self._before.values():
            if before.name in self._homes:
                continue
            why = PlacementReason.DISPLACED if before.name in self._asked else PlacementReason.UNWANTED
            moves += [
                PlacementMove(name=before.name, source=host, target="", why=why) for host in before.hosts
            ]
            if before.hosts and why == PlacementReason.DISPLACED:
                homes.append(
                    AdapterAssignment(name=before.name, hosts=(), value=0.0, why=why, moved_at=self._at)
                )
            elif not before.hosts and self._rests(before):
                homes.append(before)
        hold = {host: tuple(home.name for home in homes if host in home.hosts) for host in self._hosts}
        load = {host: self._per_seat(host) / self._fair if self._fair else 0.0 for host in self._hosts}
        return PlacementPlan(
            at=self._at, homes=tuple(homes), hold=hold, moves=tuple(moves), load=load, free=self._free
        )

    def _last_of(self, demand: VersionDemand) -> AdapterAssignment:
        return self._before.get(demand.name, NO_ASSIGNMENT)

    def _worth(self, demand: VersionDemand) -> tuple[float, str]:
        gain = self._bounds.gain if self._last_of(demand).hosts else 1.0
        return -gain * demand.value, demand.name

    def _enter(self, demand: VersionDemand) -> None:
        """Give it slots; their number follows from its load and from waiting requests."""
        bounds, at, before = self._bounds, self._at, self._last_of(demand)
        seats = self._seats / len(self._hosts)
        degree = max(1, math.ceil(demand.expected * demand.service_s / (bounds.busy * seats)))
        had = len(before.hosts) or degree
        waits = spare = None
        if demand.waiting:
            waits = at if before.waits_since is None else before.waits_since
            degree = max(degree, had)
            if at - waits >= bounds.waits_s and not self._rests(before):
                degree, waits = max(degree, had + 1), at
        elif degree < had:
            spare = at if before.spare_since is None else before.spare_since
            degree = had
            if at - spare >= bounds.spare_s:
                degree, spare = had - 1, at
        most = sum(demand.name not in host.refused for host in self._hosts.values())
        self._chosen[demand.name] = demand
        self._homes[demand.name] = AdapterAssignment(
            name=demand.name,
            hosts=(),
            value=demand.value,
            why=PlacementReason.NOWHERE,
            degree=min(degree, bounds.copies or most, most),
            moved_at=before.moved_at,
            waits_since=waits,
            spare_since=spare,
        )

    def _rests(self, home: AdapterAssignment) -> bool:
        """Whether its last move is too recent for another one."""
        return home.moved_at is not None and self._at - home.moved_at < self._bounds.move_s

    def _takes(self, host: str, demand: VersionDemand) -> bool:
        return self._room.get(host, 0) > 0 and self._could(demand.name, host)

    def _best(
        self, demand: VersionDemand, free: Sequence[PlacementHost]
    ) -> tuple[PlacementHost, PlacementReason]:
        """The best replica of ``free`` for it, and the reason."""

        def claim(host: PlacementHost) -> float:
            return rendezvous(demand.key, host.key, host.seats)

        share = demand.expected / self._homes[demand.name].degree
        # A version that exceeds the bound alone may go to a replica without others.
        most = self._bounds.load * self._fair
        within = [h for h in free if self._load[h.id] + share <= max(most * h.seats, share)]
        if not within:
            return min(free, key=lambda host: (self._per_seat(host.id), -claim(host))), PlacementReason.LEAST
        if resident := [host for host in within if demand.name in host.resident]:
            return max(resident, key=claim), PlacementReason.RESIDENT
        # Engines pad a batch to its largest rank, so similar ranks go together where load is low.
        light = [host for host in within if self._per_seat(host.id) < self._fair] or within
        first = max(light, key=claim)
        best = max(light, key=lambda host: (-self._padding(host, demand.rank), claim(host)))
        if best is not first:
            return best, PlacementReason.ALIKE
        return best, PlacementReason.CLAIMED if best is max(
            self._hosts.values(), key=claim
        ) else PlacementReason.BOUNDED

    def _padding(self, host: PlacementHost, rank: int) -> int:
        """The distance of ``rank`` from the largest rank on the replica."""
        return abs(rank - self._rank.get(host.id, rank))

    def _best_exchange(self, most: str) -> _Exchange:
        """The move away from ``most``, or exchange with it, after which the higher load is least."""
        best: _Exchange = (math.inf, 0, "", "", "")
        names = [(self._share(name), name) for name in self._movable(most)]
        # No exchange leaves both below their mean, so the replicas with the lowest mean come first.
        for mean, other in sorted((self._mean(most, other), other) for other in self._hosts):
            if mean * (1.0 - 1e-9) > best[0]:
                break
            returns = [(0.0, 0, "")] if self._room[other] > 0 else self._returns(other, most)
            for share, name in names if returns else ():
                if self._could(name, other):
                    best = min(best, self._exchange(most, other, name, share, returns))
        return best

    def _mean(self, one: str, other: str) -> float:
        """The load per seat of two replicas."""
        return (self._load[one] + self._load[other]) / (self._hosts[one].seats + self._hosts[other].seats)

    def _returns(self, source: str, target: str) -> list[_Return]:
        """What ``source`` can give back to ``target``, by load; of versions with the same load the first."""
        found = sorted(
            (self._share(name), len(name), name)
            for name in self._movable(source)
            if self._could(name, target)
        )
        return [each for place, each in enumerate(found) if not place or found[place - 1][0] < each[0]]

    def _exchange(
        self, most: str, other: str, name: str, share: float, returns: Sequence[_Return]
    ) -> _Exchange:
        """The best of ``returns`` for the version ``name``, which has ``share`` of the load."""

        def loads(given: _Return) -> tuple[float, float]:
            change = share - given[0]
            here = (self._load[most] - change) / self._hosts[most].seats
            there = (self._load[other] + change) / self._hosts[other].seats
            return here, there

        # The more is given back, the higher is the load here and the lower there: best where they cross.
        cross = bisect_left(returns, True, key=lambda given: operator.ge(*loads(given)))
        best = min(max(loads(given)) for given in returns[max(0, cross - 1) : cross + 1])
        # Loads that differ by a rounding may give the same; of these the first name counts.
        first = end = cross
        while first > 0 and loads(returns[first - 1])[1] <= best:
            first -= 1
        while end < len(returns) and loads(returns[end])[0] <= best:
            end += 1
        _, length, less = min(returns[first:end], key=lambda given: given[1:])
        return best, length, name, other, less

    def _movable(self, host: str) -> list[str]:
        return [name for name in self._held[host] if not self._rests(self._homes[name])]

    def _could(self, name: str, host: str) -> bool:
        there = self._hosts.get(host)
        return there is not None and host not in self._homes[name].hosts and name not in there.refused

    def _share(self, name: str) -> float:
        """Requests per second for each of its replicas."""
        return self._chosen[name].expected / len(self._homes[name].hosts)

    def _per_seat(self, host: str) -> float:
        return self._load[host] / self._hosts[host].seats

    def _give(self, demand: VersionDemand, host: str, why: PlacementReason, moved_at: float | None) -> None:
        home = self._homes[demand.name]
        self._homes[demand.name] = msgspec.structs.replace(
            home, hosts=(*home.hosts, host), why=_reason(why, demand), moved_at=moved_at
        )
        self._held[host].add(demand.name)
        self._rank[host] = max(demand.rank, self._rank.get(host, 0))
        self._room[host] -= 1
        self._load[host] += demand.expected / home.degree

    def _move(self, name: str, source: str, target: str) -> None:
        home = self._homes[name]
        hosts = tuple(target if host == source else host for host in home.hosts)
        why = _reason(PlacementReason.EVENED, self._chosen[name])
        self._homes[name] = msgspec.structs.replace(home, hosts=hosts, why=why, moved_at=self._at)
        self._held[source].remove(name)
        self._held[target].add(name)
        self._room[source] += 1
        self._room[target] -= 1
        self._load[source] -= self._share(name)
        self._load[target] += self._share(name)


def _reason(why: PlacementReason, demand: VersionDemand) -> str:
    return f"{why}; {demand.expected:.3g} requests/s times {demand.load_s:.3g} s of a load"
