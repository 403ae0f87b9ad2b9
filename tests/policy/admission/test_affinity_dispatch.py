"""Batched dispatch: requests for an adapter go together, the first always goes, passing is bounded."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.admission.affinity_dispatch import MOST_PASSED, QUANTUM, FreeSlots, dispatch
from policy.admission.equivalence_classes import EquivalenceClasses
from policy.admission.fairness import QueueOrder
from policy.request import Request
from policy.routing.cost import Candidate
from policy.types import Priority

# The adapter of a request that every replica with room could take.
EVERYWHERE = "everywhere"


class Pick(NamedTuple):
    """A request that goes to a replica."""

    request: Request
    candidate: Candidate


@dataclass
class Site:
    """Replicas with a bound each; ``holds`` are the adapters that each could serve, by default all.

    ``loads`` is whether they load adapters that do not run there, ``losses`` the seconds that sessions lose,
    ``closing`` the most tokens of a request that ends before a replica is closed.
    """

    bounds: dict[str, int]
    holds: dict[str, set[str]] = field(default_factory=dict)
    running: dict[str, list[str]] = field(default_factory=dict)
    loads: bool = True
    losses: dict[int, float] = field(default_factory=dict)
    closing: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    looks: int = 0

    def __post_init__(self) -> None:
        self.replicas = {name: Candidate(name, i, bound=b) for i, (name, b) in enumerate(self.bounds.items())}
        self.chosen: dict[int, Candidate | None] = {}

    def choose(self, request: Request) -> Candidate | None:
        self.calls += 1
        free = [
            r
            for r in self.usable(request)
            if r.in_flight < r.bound and (self.loads or request.adapter in self.runs(r))
        ]
        chosen = self.chosen[id(request)] = min(free, key=lambda r: r.in_flight, default=None)
        return chosen

    def could(self, request: Request, candidate: Candidate) -> bool:
        if request.adapter == EVERYWHERE:
            return True
        if candidate.id in request.avoid or (request.only is not None and candidate.id not in request.only):
            return False
        if request.prompt_tokens + request.long_tokens > self.closing.get(candidate.id, request.tokens * 9):
            return False
        held = self.holds.get(candidate.id)
        return held is None or request.adapter in held

    def usable(self, request: Request) -> list[Candidate]:
        self.looks += 1
        return [r for r in self.replicas.values() if self.could(request, r)]

    def unserved(self, adapters: Set[str], candidates: list[Candidate]) -> set[str]:
        holds = [self.holds.get(r.id, adapters) for r in candidates]
        return {name for name in adapters - {EVERYWHERE} if not any(name in held for held in holds)}

    def runs(self, candidate: Candidate) -> Set[str]:
        return {"", EVERYWHERE, *self.running.get(candidate.id, ())}

    def loss_s(self, request: Request, candidate: Candidate) -> float:
        return self.losses.get(request.session, 0.0)

    def serve(self, order: list[QueueOrder], *, plain: bool = False) -> list[Pick]:
        """``plain``: another one fits everywhere and has no turn, so that all these are looked at."""
        picks = []
        waiting = EquivalenceClasses()
        for number, turn in enumerate(order):
            turn.request.ticket = number
            waiting.add(turn.request)
        if plain:
            waiting.add(Request("m", adapter=EVERYWHERE, ticket=len(order)))
        slots = FreeSlots(
            list(self.replicas.values()), self.usable, self.choose, self.runs, self.loss_s, waiting,
            self.unserved, bool(self.closing),
        )  # fmt: skip

        def walk(without: Set[str]) -> Iterator[QueueOrder]:
            return (turn for turn in order if plain or turn.request.adapter not in without)

        for request in dispatch(walk, slots):
            chosen = self.chosen[id(request)]
            assert chosen is not None
            chosen.in_flight += 1
            waiting.remove(request)
            self.running.setdefault(chosen.id, []).append(request.adapter)
            picks.append(Pick(request, chosen))
        return picks


def queue_of(*requests: Request, passed: int = 0, step: float = 10.0) -> list[QueueOrder]:
    for request in requests:
        request.passed = passed
    return [QueueOrder(request, i * step) for i, request in enumerate(requests)]


def adapters_of(picks: list[Pick]) -> list[str]:
    return [pick.request.adapter for pick in picks]


@pytest.mark.parametrize(
    ("waiting", "bound", "in_use", "held", "dispatched"),
    [
        ("abababab", 3, "", "ab", ["a", "a", "a"]),
        ("abc", 2, "c", "abc", ["a", "c"]),
        ("xaa", 2, "", "a", ["a", "a"]),
    ],
    ids=["same adapter first", "then an adapter in use", "one without a replica delays no other"],
)
def test_adapters_grouped(waiting: str, bound: int, in_use: str, held: str, dispatched: list[str]) -> None:
    requests = [Request("m", adapter=name) for name in waiting]
    site = Site({"r": bound}, holds={"r": set(held)}, running={"r": list(in_use)})
    assert adapters_of(site.serve(queue_of(*requests))) == dispatched
    assert not requests[0].passed


def test_each_replica_gets_few_adapters() -> None:
    order = queue_of(*(Request("m", adapter=name) for name in "abcdabcdabcdabcd"))
    site = Site({"r": 8, "s": 8})
    assert len(site.serve(order)) == 16
    mixed = sum(len(set(running)) for running in site.running.values())
    assert mixed <= 6  # the fair order alone puts all four on each


def test_a_shared_prefix_goes_before_a_shared_adapter() -> None:
    requests = [Request("m", prefix=(1, 2)), Request("m", prefix=(3,)), Request("m", prefix=(1, 4))]
    picks = Site({"r": 2}).serve(queue_of(*requests))
    assert [pick.request for pick in picks] == [requests[0], requests[2]]
    assert [request.passed for request in requests] == [0, 1, 0]


@pytest.mark.parametrize(
    ("bounds", "last"),
    [
        ({"passed": MOST_PASSED}, Priority.STANDARD),
        ({"step": QUANTUM + 1}, Priority.STANDARD),
        ({}, Priority.BATCH),
    ],
)
def test_passing_is_bounded_by_count_distance_and_priority(bounds: dict[str, Any], last: Priority) -> None:
    requests = [Request("m", adapter=name) for name in "ab"] + [Request("m", adapter="a", priority=last)]
    assert adapters_of(Site({"r": 2}).serve(queue_of(*requests, **bounds))) == ["a", "b"]


@pytest.mark.parametrize(
    ("bounds", "last", "dispatched"),
    [
        ({}, Priority.STANDARD, [3, 2]),
        ({"passed": MOST_PASSED - 1}, Priority.STANDARD, [3, 1]),
        ({"passed": MOST_PASSED}, Priority.STANDARD, [1, 2]),
        ({"step": 0.6 * QUANTUM}, Priority.STANDARD, [2, 1]),
        ({}, Priority.BATCH, [2, 1]),
    ],
)
def test_the_session_that_loses_most_by_waiting_goes_first_within_the_bounds(
    bounds: dict[str, Any], last: Priority, dispatched: list[int]
) -> None:
    requests = [Request("m", session=i) for i in (1, 2)] + [Request("m", session=3, priority=last)]
    picks = Site({"r": 2}, losses={2: 0.5, 3: 1.5}).serve(queue_of(*requests, **bounds))
    assert [pick.request.session for pick in picks] == dispatched


@pytest.mark.parametrize(
    "site",
    [
        Site({"r": 2, "s": 1}, holds={"r": {"", "a"}, "s": set("bcdefg")}),
        Site({"r": 2, "s": 1}, running={"r": ["a"]}, loads=False),
    ],
    ids=["their replica is full", "their adapters would have to wait for loads"],
)
def test_requests_that_have_no_place_delay_no_others(site: Site) -> None:
    site.replicas["s"].in_flight = 1
    waiting = [Request("m", adapter=name, priority=Priority.CRITICAL) for name in "bcdefg" * 20]
    fitting = [Request("m", adapter=name, priority=Priority.BATCH) for name in ("a", "")]
    assert [pick.request for pick in site.serve(queue_of(*waiting, *fitting))] == fitting
    assert site.calls <= 4


def test_the_router_is_rarely_called_when_all_replicas_are_full() -> None:
    site = Site({"r": 0})
    assert not site.serve(queue_of(*(Request("m") for _ in range(1000))))
    assert site.calls <= 8


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 9000)), max_size=60),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.lists(st.sets(st.sampled_from("abc")), min_size=3, max_size=3),
)
def test_invariants(entries: list[tuple[str, int, int]], bounds: list[int], holds: list[set[str]]) -> None:
    tag = 0.0
    order = []
    for adapter, prefix, tokens in entries:
        order.append(QueueOrder(Request("m", adapter=adapter, prefix=(prefix,)), tag))
        tag += tokens
    names = [str(i) for i in range(len(bounds))]
    site = Site(dict(zip(names, bounds, strict=True)), holds=dict(zip(names, holds, strict=False)))
    picks = site.serve(order)

    place = {id(turn.request): i for i, turn in enumerate(order)}
    picked = [place[id(pick.request)] for pick in picks]
    assert len(picked) == len(set(picked)), "no request is dispatched twice"
    for candidate in site.replicas.values():
        assert candidate.in_flight <= candidate.bound
    if any(site.could(turn.request, r) and r.bound for turn in order[:1] for r in site.replicas.values()):
        assert picked[0] == 0, "the first is always dispatched"
    passed: Counter[int] = Counter()
    for nth, pick in enumerate(picks):
        before = {
            at
            for at in range(picked[nth])
            if at not in picked[:nth] and site.could(order[at].request, pick.candidate)
        }
        assert all(order[picked[nth]].tag - order[at].tag <= QUANTUM for at in before)
        passed.update(before)
    assert all(turn.request.passed == passed[at] <= MOST_PASSED for at, turn in enumerate(order))


@given(st.lists(st.sampled_from("aab"), min_size=1, max_size=100), st.integers(1, 5))
def test_every_request_is_dispatched_eventually(adapters: list[str], bound: int) -> None:
    """Replicas end all requests between two rounds: the queue becomes empty after some rounds."""
    waiting = queue_of(*(Request("m", adapter=name) for name in adapters))
    rounds = 0
    while waiting:
        rounds += 1
        dispatched = {id(pick.request) for pick in Site({"r": bound}).serve(waiting)}
        waiting = [turn for turn in waiting if id(turn.request) not in dispatched]
        assert all(turn.request.passed <= MOST_PASSED for turn in waiting)
    assert rounds == -(-len(adapters) // bound)


NAMES = "rst"
REQUIREMENTS = st.tuples(
    st.sampled_from(["", "", "a", "b"]),
    st.sets(st.sampled_from(NAMES)),
    st.none() | st.frozensets(st.sampled_from(NAMES)),
)
# Which requirements, tokens of prompt and answer, and session.
WAITING = st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2))


@given(
    st.lists(REQUIREMENTS, min_size=3, max_size=3),
    st.lists(st.lists(WAITING, max_size=30), min_size=2, max_size=2),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.fixed_dictionaries(
        {"loads": st.booleans()},
        optional={
            "holds": st.dictionaries(st.sampled_from(NAMES), st.sets(st.sampled_from(["", "a", "b"]))),
            "running": st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from("ab"), max_size=2)),
            "closing": st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(2, 18))),
        },
    ),
)
def test_the_same_requests_go_to_the_same_replicas_as_if_each_were_looked_at(
    required: list[tuple[str, set[str], frozenset[str] | None]],
    waiting: list[list[tuple[int, int, int, int]]],
    bounds: list[int],
    site: dict[str, Any],
) -> None:
    def dispatched(*, plain: bool) -> tuple[list[tuple[int, str]], list[int]]:
        requests = []
        for priority, entries in zip(Priority, waiting, strict=False):
            for which, prompt, output, session in entries:
                adapter, avoid, only = required[which]
                tokens = {"prompt_tokens": prompt, "output_tokens": output}
                request = Request("m", "", priority, adapter, avoid=set(avoid), session=session, **tokens)
                request.only = only
                requests.append(request)
        replicas = dict(zip(NAMES, bounds, strict=True))
        picks = Site(replicas, losses={1: 0.5, 2: 1.5}, **copy.deepcopy(site)).serve(
            queue_of(*requests), plain=plain
        )
        return [(pick.request.ticket, pick.candidate.id) for pick in picks], [r.passed for r in requests]

    assert dispatched(plain=False) == dispatched(plain=True)


def test_the_one_that_fits_is_found_behind_thousands_that_do_not() -> None:
    waiting = [Request("m", avoid={"r"}) for _ in range(2000)]
    fits = Request("m")
    site = Site({"r": 4, "s": 0})
    assert [pick.request for pick in site.serve(queue_of(*waiting, fits))] == [fits]
    site = Site({"r": 4, "s": 0})
    assert [pick.request for pick in site.serve(queue_of(fits, *waiting))] == [fits]
    assert site.looks < 100
