"""Ahead of the load: each term alone, what makes it wait, and what it leaves to the next decision."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.config.control import SloConfig
from policy.engine.replica_capacity import Capability
from policy.scaling.policies.predictive import EACH, SOON_S, Predictive, capacity
from policy.scaling.view import Proposal
from policy.signals.types import Demand, Rates
from tests.policy.scaling.views import START, demand, late, proposals, replicas, view

POLICY = Predictive()


def decide(*args: Any, memory: Any = None, **more: Any) -> Proposal:
    return POLICY.decide(view(*args, **more), memory)


def steady(load: float, *, lead_s: float = 30.0, seconds: int = 600, count: int = 3) -> Any:
    """The memory after ten minutes of one load."""
    rows = [(float(at), demand(load)) for at in range(-seconds, 0, 5)]
    return proposals(POLICY, rows, count=count, lead_s=lead_s)[-1].memory


def test_a_load_that_stays_needs_its_margin() -> None:
    """Four requests per second a replica: 11.3 are 2.99 with their margin, 11.4 are 3.02."""
    assert [
        decide(demand(load), memory=steady(load), count=3).count for load in (10.0, 11.3, 11.4, 15.0, 15.2)
    ] == [3, 3, 4, 4, 5]


def test_before_anything_was_seen_more_is_kept_ready() -> None:
    first = decide(demand(10.0))
    assert (first.count, first.forecast) == (3, 10.0)
    assert first.forecast_high == pytest.approx(12.0)


def test_what_was_not_foreseen_is_kept_ready_for() -> None:
    """A load that jumps by half every three minutes: what stands by grows once it was seen."""
    rows = [(float(at), demand(24.0 if at % 180 < 60 else 16.0)) for at in range(0, 1800, 5)]
    calm = [(at, demand(16.0)) for at, _ in rows]
    jumpy, steady_ = (proposals(POLICY, each, count=6)[-1] for each in (rows, calm))
    assert jumpy.forecast_high is not None
    assert jumpy.forecast is not None
    assert jumpy.forecast_high - jumpy.forecast > 2.5
    assert steady_.forecast_high == pytest.approx(steady_.forecast, abs=0.01)
    careless = Predictive(quantile=0.5)
    assert careless.decide(view(demand(16.0), at=1800.0), jumpy.memory).count < jumpy.count


def test_a_backlog_asks_for_more_unless_it_clears_before_a_start_is_over() -> None:
    memory = steady(10.0)
    calm = decide(demand(10.0), memory=memory, count=3)
    # Three serve 12 of 10 requests per second: in 30 s they work off 60.
    clears = decide(demand(10.0, queued=55), memory=memory, count=3)
    stays = decide(demand(10.0, queued=120), memory=memory, count=3)
    assert (calm.count, clears.count, stays.count) == (3, 3, 4)
    assert "queue" not in clears.terms
    assert stays.terms["queue"] == pytest.approx((120 - 60) / 15.0 / 4.0)
    assert stays.reason.endswith(", 120 queued")


def test_nobody_is_started_for_who_will_have_given_up() -> None:
    """A start takes ten minutes and a request waits for one: it does not find ten minutes of others."""
    memory = steady(14.0)
    seen = demand(14.0, queued=1)
    found = decide(seen, memory=memory, count=3, lead_s=600.0, most=200)
    # Two requests per second are too many for three; those of the last minute will wait.
    assert found.terms["queue"] == pytest.approx((1 + 2.0 * 60.0) / 15.0 / 4.0)
    patient = decide(seen, memory=memory, count=3, lead_s=600.0, queue_s=3600.0, most=200)
    assert patient.terms["queue"] == pytest.approx((1 + 2.0 * 600.0) / 15.0 / 4.0)
    near = decide(seen, memory=memory, count=4, serving=3, lead_s=600.0, starting_s=(300.0,), most=200)
    assert "queue" not in near.terms


def test_what_starts_counts_from_when_it_is_ready() -> None:
    """Two more that are ready in ten seconds work off 160 before a third would come."""
    memory = steady(10.0)
    seen = demand(10.0, queued=150)
    alone = decide(seen, memory=memory, count=3).terms["queue"]
    near = decide(seen, memory=memory, count=5, starting_s=(10.0, 10.0))
    far = decide(seen, memory=memory, count=5, starting_s=(29.0, 29.0))
    assert "queue" not in near.terms
    assert near.count == 5
    assert 0 < far.terms["queue"] < alone


def test_nothing_goes_while_something_starts() -> None:
    memory = steady(4.0)
    assert decide(demand(4.0), memory=memory, count=5).count == 2
    assert decide(demand(4.0), memory=memory, count=5, starting_s=(3.0,)).count == 5


def test_a_replica_goes_only_when_the_others_stay_below_the_limit() -> None:
    careful = Predictive(down=0.8)
    memory = steady(10.0)
    # 2.75 replicas are needed: three would be loaded to 0.92, four to 0.69.
    assert careful.decide(view(demand(10.0), count=5), memory).count == 4
    assert careful.decide(view(demand(10.0), count=3), memory).count == 3


def test_what_was_taken_back_soon_is_given_up_more_reluctantly() -> None:
    """Three carry 11, and 12 come in 20 s by chance; a fourth that is taken back stays, for a while."""
    chance = msgspec.structs.replace(
        demand(11.0), arrivals=Rates(last_6_s=11.0, last_20_s=12.0, last_60_s=11.0, last_600_s=11.0)
    )
    calm, memory = demand(11.0), steady(11.0, seconds=1000, count=4)

    def after(at: float, count: int, seen: Demand, mode: str = "multi-replica") -> int:
        nonlocal memory
        proposal = POLICY.decide(msgspec.structs.replace(view(seen, at=at, count=count), mode=mode), memory)
        memory = proposal.memory
        return proposal.count

    assert after(0.0, 4, calm) == 3
    assert after(5.0, 3, chance) == 4
    assert after(10.0, 4, calm) == 4
    assert memory["reluctance"]["spare"] == pytest.approx(EACH, rel=0.01)
    assert after(3600.0, 4, calm) == 3
    # Taken back, but long after it was given up.
    assert after(3605.0 + SOON_S, 3, calm) == 3
    assert after(3610.0 + 2 * SOON_S, 3, chance) == 4
    assert after(3615.0 + 2 * SOON_S, 4, calm) == 3


def test_what_one_mode_was_reluctant_to_give_up_is_nothing_to_another() -> None:
    memory = steady(11.0, seconds=1000, count=4)
    memory["reluctance"] |= {"spare": EACH}
    seen = view(demand(11.0), count=4)
    assert POLICY.decide(seen, memory).count == 4
    assert POLICY.decide(msgspec.structs.replace(seen, mode="single-large"), memory).count == 3
    assert POLICY.decide(view(demand(0.0), count=4, least=0), memory).count == 0


def test_first_tokens_that_come_late_ask_for_one_more_than_serve() -> None:
    memory = steady(4.0)
    seen = demand(4.0, queued=700, ttft=late(2.5))
    slow = Predictive(drain_s=3600.0)
    assert slow.decide(view(seen, count=6), memory).terms["late"] == 7.0
    assert slow.decide(view(seen, count=6), memory).count == 7
    assert slow.decide(view(seen, count=7, starting_s=(9.0,)), memory).count == 7
    in_time = demand(4.0, queued=700, ttft=late(1.5))
    assert "late" not in slow.decide(view(in_time, count=6), memory).terms
    nobody_waits = demand(4.0, ttft=late(2.5))
    assert "late" not in slow.decide(view(nobody_waits, count=6), memory).terms


def test_full_caches_ask_on_their_own() -> None:
    """Long requests: few arrive, and two thirds of 80,000 tokens are in use at each of three."""
    figures = replicas(3, kv_used=0.8)
    seen = decide(demand(1.0), memory=steady(1.0), count=3, figures=figures)
    assert seen.count == 4
    assert seen.reason == "tokens in KV caches need 3.53 replicas"


@pytest.mark.parametrize(
    ("capability", "slo", "mu"),
    [
        (Capability(mu=4.0, mu_max=6.0), SloConfig(ttft_p95_s=1.0), 4.0),
        (Capability(mu=4.0, mu_max=6.0), SloConfig(itl_p95_s=0.1), 4.0),
        (Capability(mu=6.0, mu_max=6.0), SloConfig(), 5.1),
        (Capability(mu=0.0, mu_max=6.0), SloConfig(ttft_p95_s=0.001), 5.1),
        (Capability(mu=4.0, mu_max=6.0, error=0.25), SloConfig(ttft_p95_s=1.0), 3.2),
        (Capability(mu=4.0, mu_max=6.0, error=9.0), SloConfig(ttft_p95_s=1.0), 4.0 / 1.5),
    ],
)
def test_what_a_replica_takes(capability: Capability, slo: SloConfig, mu: float) -> None:
    assert capacity(view(demand(1.0), capability=capability, slo=slo)) == pytest.approx(mu)


@pytest.mark.parametrize(("slowness", "mu"), [(1.0, 4.0), (0.5, 4.0), (2.0, 2.0), (100.0, 0.8), (0.0, 4.0)])
def test_a_slow_replica_counts_for_less(slowness: float, mu: float) -> None:
    assert capacity(view(demand(1.0), figures=replicas(2, slowness=slowness))) == pytest.approx(mu)
    mixed = replicas(1) + replicas(1, slowness=slowness)
    assert capacity(view(demand(1.0), figures=mixed)) == pytest.approx((4.0 + mu) / 2)


def test_without_a_model_of_the_engine_the_caches_still_count() -> None:
    nothing = Capability(mu=0.0, mu_max=0.0)
    unknown = decide(demand(50.0), capability=nothing, count=3)
    assert (unknown.count, unknown.reason) == (3, "the capacity of a replica is unknown")
    assert unknown.memory is not None
    known = decide(
        demand(50.0),
        capability=Capability(mu=0.0, mu_max=0.0, kv_tokens=100_000),
        count=3,
        figures=replicas(3, kv_used=0.8),
    )
    assert known.count == 4


def test_who_is_deserted_needs_nobody_and_who_is_asked_one() -> None:
    memory = steady(8.0)
    gone = decide(demand(0.0), memory=memory, count=2, least=0)
    assert (gone.count, gone.forecast, gone.reason) == (0, 0.0, "no requests")
    assert decide(demand(0.0, concurrency=1.0), memory=None, count=1, least=0).count == 1
    assert decide(demand(0.0, queued=1), memory=None, count=0, least=0).count == 1
    assert decide(demand(0.0), memory=memory, count=2, least=1).count == 1


def test_a_rare_decision_looks_at_a_longer_window() -> None:
    """A burst of six seconds a minute after the last decision is a sixth of what it looks like."""
    last = steady(10.0)
    burst = Rates(last_6_s=40.0, last_20_s=19.0, last_60_s=13.0, last_600_s=10.0)
    seen = msgspec.structs.replace(demand(10.0), arrivals=burst)
    levels = [decide(seen, memory=last, at=at).memory["series"]["level"] for at in (5.0, 25.0, 65.0)]
    assert levels[0] > 16.0
    assert levels[1] < 16.0
    assert levels[2] < 13.0
    assert POLICY.decide(view(seen, at=0.0), None).memory["series"]["level"] == 40.0


def test_the_state_of_another_policy_is_ignored() -> None:
    assert decide(demand(10.0), memory={"k2": {"small": 100.0}}) == decide(demand(10.0))


def test_its_memory_is_small_and_its_reasons_are_sentences() -> None:
    memory = steady(30.0, seconds=3600)
    assert len(msgspec.json.encode(memory)) < 1200
    assert memory["series"]["at"] == START - 5.0
    found = decide(demand(30.0), memory=memory)
    assert found.reason == "requests of the last 20 s need 7.95 replicas"
    rising = decide(demand(30.0), memory=None, lead_s=45.0)
    assert rising.reason == "up to 36 req/s forecast in 45 s need 9 replicas"
