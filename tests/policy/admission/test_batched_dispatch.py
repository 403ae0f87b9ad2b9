"""The laws of a batch: like goes with like, the first is never left, and nobody is passed for long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.admission.batched_dispatch import MOST_PASSED, QUANTUM, WINDOW, Assignment, FreeSlots, dispatch
from policy.admission.queue import Waiting
from policy.request import Request
from policy.routing.cost import Candidate, CostEstimate
from policy.types import Priority


@dataclass
class Site:
    """Replicas with a bound each; ``holds`` are the adapters that each could serve, by default all."""

    bounds: dict[str, int]
    holds: dict[str, set[str]] = field(default_factory=dict)
    running: dict[str, list[str]] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        self.replicas = {name: Candidate(name, i, bound=b) for i, (name, b) in enumerate(self.bounds.items())}

    def quote(self, request: Request) -> CostEstimate | None:
        self.asked += 1
        free = [r for r in self.replicas.values() if r.in_flight < r.bound and self.could(request, r)]
        return CostEstimate(min(free, key=lambda r: r.in_flight)) if free else None

    def could(self, request: Request, candidate: Candidate) -> bool:
        held = self.holds.get(candidate.id)
        return held is None or request.adapter in held

    def runs(self, candidate: Candidate) -> Container[str]:
        return {"", *self.running.get(candidate.id, ())}

    def serve(self, order: list[Waiting]) -> list[Assignment]:
        picks = []
        for pick in dispatch(iter(order), FreeSlots(self.quote, self.could, self.runs)):
            pick.quote.candidate.in_flight += 1
            self.running.setdefault(pick.quote.candidate.id, []).append(pick.request.adapter)
            picks.append(pick)
        return picks


def line(*requests: Request, passed: int = 0, step: float = 10.0) -> list[Waiting]:
    return [Waiting(request, i * step, passed) for i, request in enumerate(requests)]


def named(picks: list[Assignment]) -> list[str]:
    return [pick.request.adapter for pick in picks]


def test_the_first_goes_and_its_like_go_with_it() -> None:
    order = line(*(Request("m", adapter=name) for name in "abababab"))
    site = Site({"r": 3})
    assert named(site.serve(order)) == ["a", "a", "a"]


def test_each_replica_gets_few_adapters() -> None:
    order = line(*(Request("m", adapter=name) for name in "abcdabcdabcdabcd"))
    site = Site({"r": 8, "s": 8})
    assert len(site.serve(order)) == 16
    mixed = sum(len(set(running)) for running in site.running.values())
    assert mixed <= 6  # the fair order alone puts all four on each


def test_a_shared_prefix_goes_before_a_shared_adapter() -> None:
    requests = [Request("m", prefix=(1, 2)), Request("m", prefix=(3,)), Request("m", prefix=(1, 4))]
    picks = Site({"r": 2}).serve(line(*requests))
    assert [pick.request for pick in picks] == [requests[0], requests[2]]
    assert picks[1].passed == (requests[1],)


def test_what_runs_already_is_company() -> None:
    requests = [Request("m", adapter=name) for name in "abc"]
    site = Site({"r": 2}, running={"r": ["c"]})
    assert named(site.serve(line(*requests))) == ["a", "c"]


def test_who_can_go_nowhere_holds_nobody_up() -> None:
    order = line(Request("m", adapter="gone"), Request("m"), Request("m"))
    picks = Site({"r": 2}, holds={"r": {""}}).serve(order)
    assert named(picks) == ["", ""]
    assert all(not pick.passed for pick in picks)


@pytest.mark.parametrize(
    ("bounds", "last"),
    [
        ({"passed": MOST_PASSED}, Priority.STANDARD),
        ({"step": QUANTUM + 1}, Priority.STANDARD),
        ({}, Priority.BATCH),
    ],
)
def test_nobody_is_passed_too_often_or_by_too_much_or_by_a_lesser_class(
    bounds: dict[str, Any], last: Priority
) -> None:
    requests = [Request("m", adapter=name) for name in "ab"] + [Request("m", adapter="a", priority=last)]
    assert named(Site({"r": 2}).serve(line(*requests, **bounds))) == ["a", "b"]


def test_a_full_fleet_is_asked_only_a_few_times() -> None:
    site = Site({"r": 0})
    assert not site.serve(line(*(Request("m") for _ in range(1000))))
    assert site.asked <= 8


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 9000)), max_size=60),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.lists(st.sets(st.sampled_from("abc")), min_size=3, max_size=3),
)
def test_laws(entries: list[tuple[str, int, int]], bounds: list[int], holds: list[set[str]]) -> None:
    tag = 0.0
    order = []
    for adapter, prefix, tokens in entries:
        order.append(Waiting(Request("m", adapter=adapter, prefix=(prefix,)), tag, 0))
        tag += tokens
    names = [str(i) for i in range(len(bounds))]
    site = Site(dict(zip(names, bounds, strict=True)), holds=dict(zip(names, holds, strict=False)))
    picks = site.serve(order)

    place = {id(turn.request): i for i, turn in enumerate(order)}
    picked = [place[id(pick.request)] for pick in picks]
    assert len(picked) == len(set(picked)), "nobody goes twice"
    assert all(at < WINDOW for at in picked)
    for candidate in site.replicas.values():
        assert candidate.in_flight <= candidate.bound
    if any(site.could(turn.request, r) and r.bound for turn in order[:1] for r in site.replicas.values()):
        assert picked[0] == 0, "the first is never left"
    passed: Counter[int] = Counter()
    for nth, pick in enumerate(picks):
        before = {
            at
            for at in range(picked[nth])
            if at not in picked[:nth] and site.could(order[at].request, pick.quote.candidate)
        }
        assert {place[id(request)] for request in pick.passed} == before
        assert all(order[picked[nth]].tag - order[at].tag <= QUANTUM for at in before)
        passed.update(before)
    assert all(count <= MOST_PASSED for count in passed.values())


@given(st.lists(st.sampled_from("aab"), min_size=1, max_size=100), st.integers(1, 5))
def test_everyone_goes_in_the_end(adapters: list[str], bound: int) -> None:
    """Replicas that end all between two rounds: the queue is empty after as many rounds as it takes."""
    waiting = line(*(Request("m", adapter=name) for name in adapters))
    passed: Counter[int] = Counter()
    rounds = 0
    while waiting:
        rounds += 1
        site = Site({"r": bound})
        picks = site.serve([Waiting(t.request, t.tag, passed[id(t.request)]) for t in waiting])
        gone = {id(pick.request) for pick in picks}
        passed.update(id(request) for pick in picks for request in pick.passed)
        waiting = [turn for turn in waiting if id(turn.request) not in gone]
    assert rounds == -(-len(adapters) // bound)
    assert all(count <= MOST_PASSED for count in passed.values())
