"""Routing policies in virtual time: what each does, and what the gateway's is worth beside them.

The figures are those of ``python -m loadtests.bench.affinity_policy``, of fewer draws.
"""

from __future__ import annotations

import random
import statistics
from functools import cache

import pytest

from loadtests.bench.offline.event_loop import HOP_S, Case, arrivals, play
from loadtests.bench.offline.main import CASES, Outcome, run
from loadtests.bench.offline.policies import POLICIES, LeastLoaded, RoundRobin, Spilling
from loadtests.bench.parts.routing import least_pairs
from loadtests.bench.replica import Setting
from policy.request import Request
from policy.routing.router import Candidate

QUICK = Setting(chunks=2, gap_s=0.01, base_s=0.001, token_s=1e-5, lanes=1)


def fleet(*in_flight: int) -> list[Candidate]:
    return [Candidate(f"r{i}", key=i + 1, in_flight=count) for i, count in enumerate(in_flight)]


def test_round_robin_loads_an_adapter_on_every_replica() -> None:
    case = Case("one adapter", Setting(token_s=1e-6, load_s=0.01, slots=8, adapters=1), kinds=1)
    due = [0.1 * i for i in range(40)]
    played = play(case, RoundRobin, [0] * 40, due, random.Random(1))  # noqa: S311 - a simulation
    assert [each.loads for each in played.counts] == [1, 1, 1, 1]
    assert len(played.ttft) == 40 and played.load == 1.0


def test_least_loaded_takes_whoever_has_fewest() -> None:
    assert LeastLoaded(8).choose(Request("m"), fleet(3, 1, 2), 0.0, 0.9).id == "r1"


def test_a_spilling_home_keeps_what_chance_alone_makes_of_its_load() -> None:
    policy, request = Spilling(8), Request("m", prefix=(2, 4))
    assert policy.choose(request, fleet(0, 1, 1, 1), 0.0, 0.5).id == "r0"
    assert policy.choose(request, fleet(5, 1, 1, 1), 0.0, 0.5).id == "r0"
    assert policy.choose(request, fleet(9, 1, 1, 0), 0.0, 0.5).id == "r3"
    assert policy.choose(request, fleet(1, 1, 1, 1), 0.0, 0.5).id == "r0", "its home is still the first"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_its_first_token_and_is_counted_once(policy: str) -> None:
    case = Case("short", QUICK, kinds=5, requests=60, workers=2, leaves=20, joins=40)
    drawn, due = arrivals(case, "1")
    played = play(case, POLICIES[policy], drawn, due, random.Random(1))  # noqa: S311 - a simulation
    assert len(played.ttft) == sum(each.requests for each in played.counts) == 60
    assert min(played.ttft) >= QUICK.base_s + 2 * HOP_S


def test_the_same_seed_gives_the_same_outcome() -> None:
    case = Case("short", QUICK, requests=200)
    assert run(case, "tidegate", 3) == run(case, "tidegate", 3)


def test_the_least_possible_is_one_home_each_while_none_exceeds_a_share() -> None:
    assert least_pairs([0, 1, 2, 3] * 10, replicas=4, bound=1.1, room=4) == 4
    assert least_pairs([0] * 30 + [1, 2, 3] * 4, replicas=4, bound=1.1, room=4) == 6, "three homes for one"
    assert least_pairs([0] * 12 + [1] * 12 + [2] * 12, replicas=2, bound=1.1, room=3) == 4, "one cut in two"
    assert least_pairs(list(range(9)), replicas=2, bound=1.1, room=4) == 0, "they do not fit"


@cache
def outcomes(name: str, policy: str = "tidegate", seeds: int = 8) -> list[Outcome]:
    case = next(case for case in CASES if case.name == name)
    return [run(case, policy, seed) for seed in range(seeds)]


def mean(row: list[Outcome], what: str) -> float:
    return statistics.fmean(getattr(outcome, what) for outcome in row)


@pytest.mark.slow
@pytest.mark.parametrize(("law", "beyond"), [("uniform", 0.03), ("Zipf", 0.06)])
def test_prefixes_are_computed_once_and_load_stays_even(law: str, beyond: float) -> None:
    row = outcomes(f"working set fits, {law}")
    assert mean(row, "cold") <= (1.0 + beyond) * mean(row, "least")
    assert mean(row, "load") <= 1.10


@pytest.mark.slow
@pytest.mark.parametrize("law", ["uniform", "Zipf"])
def test_eight_workers_come_close_to_one(law: str) -> None:
    many, one = outcomes(f"fits, {law}, 8 workers"), outcomes(f"working set fits, {law}")
    assert mean(many, "hit") >= mean(one, "hit") - 0.03
    assert mean(many, "load") <= 1.12


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene", ["working set fits, uniform", "working set fits, Zipf", "does not fit, uniform"]
)
@pytest.mark.parametrize("rival", ["smg cache aware", "sglang cache aware"])
def test_first_tokens_come_no_later_than_with_a_rival(scene: str, rival: str) -> None:
    ours, theirs = outcomes(scene), outcomes(scene, rival)
    for what in ("mean", "p50", "p99"):
        assert mean(ours, what) <= 1.01 * mean(theirs, what), what


@pytest.mark.slow
@pytest.mark.parametrize("which", ["", ", 8 workers"])
def test_adapters_are_loaded_less_often_and_nobody_waits_for_it(which: str) -> None:
    name = f"200 adapters, Zipf{which}"
    ours, least = outcomes(name, seeds=4), outcomes(name, "least loaded", seeds=4)
    assert mean(ours, "cold") <= 0.7 * mean(least, "cold")
    assert mean(ours, "mean") <= mean(least, "mean")
    assert mean(ours, "load") <= 1.12


@pytest.mark.slow
def test_a_replica_that_leaves_and_comes_back_is_given_its_share() -> None:
    row = outcomes("fits, Zipf, a replica leaves and joins")
    assert mean(row, "hit") > 0.97
    assert mean(row, "load") <= 1.2
