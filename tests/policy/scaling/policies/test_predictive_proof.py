"""The observed capacity per replica, from arrival rates and KV cache use."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from policy.config.control import SloConfig
from policy.engine.replica_capacity import Capability
from policy.scaling.policies.observed_capacity import (
    LOST_S,
    WON_S,
    ObservedCapacity,
    observe_capacity,
    sustained,
)
from policy.scaling.policies.predictive import Predictive
from policy.scaling.view import View
from policy.signals.types import Shares
from tests.policy.scaling.views import demand, late, replicas, view

# A pessimistic engine model: 8 requests per second at saturation, 4 within the SLO.
PESSIMISTIC = Capability(mu=4.0, mu_max=8.0, kv_tokens=100_000, seats=64)


def seen(at: float, load: float = 12.0, kv_used: float = 0.4, count: int = 3, **more: Any) -> View:
    figures = replicas(count, kv_used=kv_used)
    return view(demand(load, **more), at=at, count=count, figures=figures, capability=PESSIMISTIC)


def after(*views: View) -> ObservedCapacity:
    proof = None
    for each in views:
        proof = observe_capacity(proof, each, 0.0)
    assert proof is not None
    return proof


def test_capacity_is_extrapolated_to_a_full_cache() -> None:
    """Four requests per second per replica fill 0.5 of its cache: 6.4 would fill 0.8."""
    proof = after(*(seen(at, kv_used=0.5) for at in range(0, 600, 5)))
    assert proof.rate == pytest.approx(4.0)
    assert proof.used == pytest.approx(0.5)
    assert sustained(proof, seen(600.0), 4.0, 0.8) == pytest.approx(6.4)
    assert sustained(proof, seen(600.0), 4.0, 0.6) == pytest.approx(4.8)


def test_observed_capacity_is_between_the_model_and_saturation() -> None:
    idle = after(*(seen(at, load=3.0, kv_used=0.1) for at in range(0, 600, 5)))
    assert sustained(idle, seen(600.0), 4.0, 0.8) == 4.0
    roomy = after(*(seen(at, kv_used=0.05) for at in range(0, 600, 5)))
    assert sustained(roomy, seen(600.0), 4.0, 0.85) == pytest.approx(0.85 * 8.0)
    exact = Capability(mu=4.0, mu_max=4.0 / 0.85, kv_tokens=100_000, seats=64)
    limited = msgspec.structs.replace(seen(600.0), capability=exact)
    assert sustained(roomy, limited, 4.0, 0.85) == pytest.approx(4.0)


@pytest.mark.parametrize(
    "signs",
    [{"ttft": late(1.6)}, {"itl": late(0.09)}, {"met": Shares(ttft=0.98, both=0.98)}],
    ids=["ttft", "itl", "met"],
)
def test_latencies_near_the_slo_reduce_trust_over_time(signs: dict[str, Any]) -> None:
    slo = SloConfig(ttft_p95_s=2.0, itl_p95_s=0.1)

    def views(since: float, until: float, **more: Any) -> list[View]:
        instants = range(int(since), int(until), 5)
        return [msgspec.structs.replace(seen(at, load=15.0, **more), slo=slo) for at in instants]

    within_slo = views(0, 600)
    trusted = sustained(after(*within_slo), within_slo[-1], 4.0, 0.85)
    assert trusted > 5.0
    # After half and all of the time to lose trust, and half of the time to restore it.
    halfway = [*within_slo, *views(600, 600 + LOST_S / 2, **signs)]
    assert after(*halfway).trust == pytest.approx(0.5)
    assert sustained(after(*halfway), halfway[-1], 4.0, 0.85) == pytest.approx((4.0 + trusted) / 2)
    ended = [*within_slo, *views(600, 600 + LOST_S, **signs)]
    assert sustained(after(*ended), ended[-1], 4.0, 0.85) == pytest.approx(4.0)
    again = [*ended, *views(600 + LOST_S, 600 + LOST_S + WON_S / 2)]
    assert after(*again).trust == pytest.approx(0.5)


def test_capacity_is_smoothed_over_the_start_up_time() -> None:
    known = after(*(seen(at, kv_used=0.5) for at in range(0, 600, 5)))
    before = msgspec.structs.replace(known, mu=3.0)
    at_once = sustained(known, seen(600.0), 4.0, 0.8)
    # Five of the thirty seconds of a start after the last observation.
    later = sustained(before, seen(600.0), 4.0, 0.8)
    assert later == pytest.approx(3.0 + (at_once - 3.0) * -math.expm1(-5 / 30.0))


def test_observations_of_another_mode_or_without_metrics_do_not_count() -> None:
    proof = after(*(seen(at) for at in range(0, 600, 5)))
    other = msgspec.structs.replace(seen(600.0), mode="single-large")
    assert sustained(proof, other, 4.0, 0.85) == 4.0
    assert observe_capacity(proof, other, 0.0).mode == "single-large"
    assert sustained(observe_capacity(None, view(demand(12.0), figures=()), 0.0), seen(5.0), 4.0, 0.85) == 4.0
    assert sustained(None, seen(0.0), 4.0, 0.85) == 4.0


def test_a_larger_observed_capacity_needs_fewer_replicas() -> None:
    """Twelve requests per second need four replicas by the model; two fill half of a cache."""

    def needed(caches: float) -> int:
        policy, memory, count = Predictive(), None, 4
        for at in range(0, 900, 5):
            proposal = policy.decide(seen(float(at), kv_used=caches / count, count=count), memory)
            memory, count = proposal.memory, proposal.count
        return count

    assert needed(2.6) == 4
    assert needed(1.0) == 2
