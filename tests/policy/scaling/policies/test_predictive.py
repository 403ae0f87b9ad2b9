"""The predictive policy: each term of its need, its delays, and its memory between decisions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.config.control import SloConfig
from policy.engine.replica_capacity import Capability, IdleLatency
from policy.scaling.policies.predictive import EACH, SOON_S, Predictive, capacity
from policy.scaling.view import Proposal
from policy.signals.types import ModelDemand, Rates
from tests.policy.scaling.views import START, demand, late, proposals, replicas, view

POLICY = Predictive()


def decide(*args: Any, memory: Any = None, **more: Any) -> Proposal:
    return POLICY.decide(view(*args, **more), memory)


def steady(load: float, *, lead_s: float = 30.0, seconds: int = 600, count: int = 3) -> Any:
    """The memory after ten minutes of one load."""
    rows = [(float(at), demand(load)) for at in range(-seconds, 0, 5)]
    return proposals(POLICY, rows, count=count, lead_s=lead_s)[-1].memory


def test_the_count_includes_the_utilisation_margin() -> None:
    """Four requests per second a replica: 11.3 need 2.99 with the margin, 11.4 need 3.02."""
    assert [
        decide(demand(load), memory=steady(load), count=3).count for load in (10.0, 11.3, 11.4, 15.0, 15.2)
    ] == [3, 3, 4, 4, 5]


def test_without_past_errors_the_forecast_has_an_assumed_margin() -> None:
    first = decide(demand(10.0))
    assert (first.count, first.forecast) == (3, 10.0)
    assert first.forecast_high == pytest.approx(12.0)


def test_past_forecast_errors_raise_the_upper_forecast() -> None:
    """The load rises by half every three minutes: the reserve grows with the observed errors."""
    rows = [(float(at), demand(24.0 if at % 180 < 60 else 16.0)) for at in range(0, 1800, 5)]
    steady_rows = [(at, demand(16.0)) for at, _ in rows]
    varying, constant = (proposals(POLICY, each, count=6)[-1] for each in (rows, steady_rows))
    assert varying.forecast_high is not None
    assert varying.forecast is not None
    assert varying.forecast_high - varying.forecast > 2.5
    assert constant.forecast_high == pytest.approx(constant.forecast, abs=0.01)
    low_quantile = Predictive(quantile=0.5)
    assert low_quantile.decide(view(demand(16.0), at=1800.0), varying.memory).count < varying.count


def test_a_queue_adds_replicas_unless_it_drains_within_the_start_up_time() -> None:
    memory = steady(10.0)
    without = decide(demand(10.0), memory=memory, count=3)
    # Three replicas serve 12 requests per second and 10 arrive: in 30 s the queue shrinks by 60.
    draining = decide(demand(10.0, queued=55), memory=memory, count=3)
    remaining = decide(demand(10.0, queued=120), memory=memory, count=3)
    assert (without.count, draining.count, remaining.count) == (3, 3, 4)
    assert "queue" not in draining.terms
    assert remaining.terms["queue"] == pytest.approx((120 - 60) / 15.0 / 4.0)
    assert remaining.reason.endswith(", 120 queued")


def test_no_replica_starts_for_requests_that_will_have_timed_out() -> None:
    """A start takes ten minutes and a request waits one minute at most: the queue is at most that long."""
    memory = steady(14.0)
    seen = demand(14.0, queued=1)
    found = decide(seen, memory=memory, count=3, lead_s=600.0, most=200)
    # Two requests per second exceed the capacity of three; those of one minute will wait.
    assert found.terms["queue"] == pytest.approx((1 + 2.0 * 60.0) / 15.0 / 4.0)
    long_timeout = decide(seen, memory=memory, count=3, lead_s=600.0, queue_s=3600.0, most=200)
    assert long_timeout.terms["queue"] == pytest.approx((1 + 2.0 * 600.0) / 15.0 / 4.0)
    near = decide(seen, memory=memory, count=4, serving=3, lead_s=600.0, starting_s=(300.0,), most=200)
    assert "queue" not in near.terms


def test_a_starting_replica_counts_from_its_ready_time() -> None:
    """Two replicas that are ready in ten seconds serve 160 requests before a third could start."""
    memory = steady(10.0)
    seen = demand(10.0, queued=150)
    alone = decide(seen, memory=memory, count=3).terms["queue"]
    near = decide(seen, memory=memory, count=5, starting_s=(10.0, 10.0))
    far = decide(seen, memory=memory, count=5, starting_s=(29.0, 29.0))
    assert "queue" not in near.terms
    assert near.count == 5
    assert 0 < far.terms["queue"] < alone


def test_no_scale_down_while_a_replica_starts() -> None:
    memory = steady(4.0)
    assert decide(demand(4.0), memory=memory, count=5).count == 2
    assert decide(demand(4.0), memory=memory, count=5, starting_s=(3.0,)).count == 5


def test_a_scale_down_leaves_the_others_below_the_load_limit() -> None:
    limited = Predictive(down=0.8)
    memory = steady(10.0)
    # 2.75 replicas are needed: three would be loaded to 0.92, four to 0.69.
    assert limited.decide(view(demand(10.0), count=5), memory).count == 4
    assert limited.decide(view(demand(10.0), count=3), memory).count == 3


def test_a_reversed_scale_down_makes_the_next_more_reluctant() -> None:
    """Three serve 11 per second; a burst of 12 adds a fourth again, which then stays for a while."""
    burst = msgspec.structs.replace(
        demand(11.0), arrivals=Rates(last_6_s=11.0, last_20_s=12.0, last_60_s=11.0, last_600_s=11.0)
    )
    steady_load, memory = demand(11.0), steady(11.0, seconds=1000, count=4)

    def after(at: float, count: int, seen: ModelDemand, mode: str = "multi-replica") -> int:
        nonlocal memory
        proposal = POLICY.decide(msgspec.structs.replace(view(seen, at=at, count=count), mode=mode), memory)
        memory = proposal.memory
        return proposal.count

    assert after(0.0, 4, steady_load) == 3
    assert after(5.0, 3, burst) == 4
    assert after(10.0, 4, steady_load) == 4
    assert memory["reluctance"]["spare"] == pytest.approx(EACH, rel=0.01)
    assert after(3600.0, 4, steady_load) == 3
    # Scaled up again, but long after the scale-down.
    assert after(3605.0 + SOON_S, 3, steady_load) == 3
    assert after(3610.0 + 2 * SOON_S, 3, burst) == 4
    assert after(3615.0 + 2 * SOON_S, 4, steady_load) == 3


def test_reluctance_to_scale_down_is_per_mode() -> None:
    memory = steady(11.0, seconds=1000, count=4)
    memory["reluctance"] |= {"spare": EACH}
    seen = view(demand(11.0), count=4)
    assert POLICY.decide(seen, memory).count == 4
    assert POLICY.decide(msgspec.structs.replace(seen, mode="single-large"), memory).count == 3
    assert POLICY.decide(view(demand(0.0), count=4, least=0), memory).count == 0


def test_a_missed_ttft_slo_adds_one_to_the_serving_replicas() -> None:
    memory = steady(4.0)
    seen = demand(4.0, queued=700, ttft=late(2.5))
    slow = Predictive(drain_s=3600.0)
    assert slow.decide(view(seen, count=6), memory).terms["late"] == 7.0
    assert slow.decide(view(seen, count=6), memory).count == 7
    assert slow.decide(view(seen, count=7, starting_s=(9.0,)), memory).count == 7
    in_time = demand(4.0, queued=700, ttft=late(1.5))
    assert "late" not in slow.decide(view(in_time, count=6), memory).terms
    without_queue = demand(4.0, ttft=late(2.5))
    assert "late" not in slow.decide(view(without_queue, count=6), memory).terms


def test_full_kv_caches_alone_add_a_replica() -> None:
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
def test_capacity_of_a_replica(capability: Capability, slo: SloConfig, mu: float) -> None:
    assert capacity(view(demand(1.0), capability=capability, slo=slo)) == pytest.approx(mu)


@pytest.mark.parametrize(("slowness", "mu"), [(1.0, 4.0), (0.5, 4.0), (2.0, 2.0), (100.0, 0.8), (0.0, 4.0)])
def test_a_slow_replica_has_less_capacity(slowness: float, mu: float) -> None:
    assert capacity(view(demand(1.0), figures=replicas(2, slowness=slowness))) == pytest.approx(mu)
    mixed = replicas(1) + replicas(1, slowness=slowness)
    assert capacity(view(demand(1.0), figures=mixed)) == pytest.approx((4.0 + mu) / 2)


def test_without_an_engine_model_kv_cache_use_still_counts() -> None:
    no_capacity = Capability(mu=0.0, mu_max=0.0)
    unknown = decide(demand(50.0), capability=no_capacity, count=3)
    assert (unknown.count, unknown.reason) == (3, "the capacity of a replica is unknown")
    assert unknown.memory is not None
    known = decide(
        demand(50.0),
        capability=Capability(mu=0.0, mu_max=0.0, kv_tokens=100_000),
        count=3,
        figures=replicas(3, kv_used=0.8),
    )
    assert known.count == 4


def test_no_load_needs_no_replica_and_a_request_needs_one() -> None:
    memory = steady(8.0)
    idle = decide(demand(0.0), memory=memory, count=2, least=0)
    assert (idle.count, idle.forecast, idle.reason) == (0, 0.0, "no requests")
    assert decide(demand(0.0, concurrency=1.0), memory=None, count=1, least=0).count == 1
    assert decide(demand(0.0, queued=1), memory=None, count=0, least=0).count == 1
    assert decide(demand(0.0), memory=memory, count=2, least=1).count == 1


def test_the_rate_window_covers_the_time_since_the_last_decision() -> None:
    """A burst of six seconds counts less if the last decision was a minute ago."""
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


def test_memory_is_bounded_and_the_reason_names_the_need() -> None:
    memory = steady(30.0, seconds=3600)
    assert len(msgspec.json.encode(memory)) < 1200
    assert memory["series"]["at"] == START - 5.0
    found = decide(demand(30.0), memory=memory)
    assert found.reason == "requests of the last 20 s need 7.95 replicas"
    rising = decide(demand(30.0), memory=None, lead_s=45.0)
    assert rising.reason == "up to 36 req/s forecast in 45 s need 9 replicas"


IDLE = IdleLatency(ttft_s=1.0, itl_s=0.02, e2e_s=3.0)


# Three serve one of the three requests per second: in 30 s 60 more wait, which 12 drain in 15 s.
@pytest.mark.parametrize(("count", "queued", "most"), [(3, 0, 19), (3, 1, 19 + 13), (19, 0, 19), (19, 1, 19)])
def test_no_more_replicas_than_let_each_request_find_an_idle_one(count: int, queued: int, most: int) -> None:
    """Near the latencies of an idle replica, the capacity within the SLO is next to nothing."""
    edge, slo = Capability(mu=0.01, mu_max=0.5), SloConfig(ttft_p95_s=1.1)
    seen = demand(3.0, queued=queued)
    assert decide(seen, count=count, capability=edge, slo=slo, idle=IDLE, most=300).count == most


def test_late_first_tokens_add_no_replica_where_the_mean_request_alone_is_late() -> None:
    seen = demand(10.0, queued=120, ttft=late(4.0))
    assert "late" in decide(seen).terms
    assert "late" not in decide(seen, slo=SloConfig(ttft_p95_s=0.5), idle=IDLE).terms
