"""The proportional rule: its tolerance, and missing reports, which count against the change."""

from __future__ import annotations

import pytest

from policy.config.control import SloConfig
from policy.scaling.policies.target_tracking import TargetMetric, TargetTracking
from policy.signals.types import ReplicaSample
from tests.policy.scaling.views import counts, demand, late, replicas, view


def tracking(
    metric: TargetMetric = TargetMetric.CONCURRENCY, target: float | None = 10.0, **more: float
) -> TargetTracking:
    return TargetTracking(metric=metric, target=target, **more)


def test_the_count_follows_concurrency_beyond_the_tolerance() -> None:
    rows = [
        (0, demand(1.0, concurrency=20.0)),
        (5, demand(1.0, concurrency=21.9)),  # just below 10 % over
        (10, demand(1.0, concurrency=22.1)),
        (15, demand(1.0, concurrency=61.0)),
        (20, demand(1.0, concurrency=64.0)),  # of 7: 9 % under
        (25, demand(1.0, concurrency=62.0)),
        (30, demand(1.0, concurrency=9.0)),
        (35, demand(0.0, concurrency=0.0)),
    ]
    assert counts(tracking(), rows) == [2, 2, 3, 7, 7, 7, 1, 1]


def test_a_wider_tolerance_needs_a_larger_change() -> None:
    rows = [(0, demand(concurrency=29.0)), (5, demand(concurrency=31.0))]
    assert counts(tracking(tolerance=0.5), rows) == [2, 4]


def test_a_queue_counts_in_gateways_and_engines() -> None:
    policy = tracking(TargetMetric.QUEUE, 4.0)
    seen = view(demand(queued=8), count=2, figures=replicas(2, waiting=6))
    assert policy.decide(seen, None).count == 5


def test_starting_replicas_are_not_requested_again() -> None:
    """Eight KV caches at 90 % with a target of 70 %: 8 become 11, and 11 stay while 3 start."""
    policy = tracking(TargetMetric.KV_USED, 0.7)
    before = view(demand(1.0), count=8, figures=replicas(8, kv_used=0.9))
    assert policy.decide(before, None).count == 11
    starting = view(demand(1.0), count=11, starting_s=(20, 20, 20), figures=replicas(8, kv_used=0.9))
    assert policy.decide(starting, None).count == 11


def test_starting_replicas_cause_no_scale_down() -> None:
    policy = tracking(TargetMetric.KV_USED, 0.7)
    seen = view(demand(1.0), count=4, starting_s=(20.0, 20.0), figures=replicas(2, kv_used=0.8))
    assert policy.decide(seen, None).count == 4


@pytest.mark.parametrize(
    ("used", "silent", "count"),
    [
        (0.35, 0, 2),
        (0.35, 2, 3),  # two of four silent, counted at the target: ceil(2 * 0.5 + 2)
        (1.0, 0, 6),
        (1.0, 2, 4),  # counted as idle, the four are below the target: no scale-up
    ],
)
def test_silent_replicas_count_against_the_change(used: float, silent: int, count: int) -> None:
    figures = replicas(4 - silent, kv_used=used) + tuple(
        ReplicaSample(id=f"old{i}", age_s=60.0, kv_used=0.0) for i in range(silent)
    )
    assert (
        tracking(TargetMetric.KV_USED, 0.7).decide(view(demand(1.0), count=4, figures=figures), None).count
        == count
    )


def test_without_reports_the_count_stays() -> None:
    proposal = tracking(TargetMetric.TOKENS_PER_S).decide(view(demand(50.0), count=3, figures=()), None)
    assert (proposal.count, proposal.reason) == (3, "no replica reports tokens_per_s")
    nothing = tracking(TargetMetric.TTFT_P95).decide(view(demand(50.0), count=3), None)
    assert nothing.count == 3


def test_the_count_is_scaled_by_ttft_over_its_slo() -> None:
    policy = tracking(TargetMetric.TTFT_P95, None)
    slow = demand(8.0, ttft=late(3.0))
    assert policy.decide(view(slow, count=4), None).count == 6  # 3 s of 2 s
    assert policy.decide(view(slow, count=4, slo=SloConfig()), None).count == 12  # of 1 s


def test_without_traffic_ttft_is_no_reason_for_replicas() -> None:
    """The last TTFT is a minute old then: the count stayed as it was for ever."""
    policy = tracking(TargetMetric.TTFT_P95, None)
    rows = [(0, demand(8.0, ttft=late(2.0))), (5, demand(0.0, concurrency=1.0)), (10, demand(0.0))]
    assert counts(policy, rows, count=4) == [4, 4, 1]
    assert policy.decide(view(demand(0.0), count=4, least=0), None).count == 0
    # What is refused is no reason to have fewer.
    assert policy.decide(view(demand(8.0, concurrency=0.0), count=4), None).count == 4


def test_a_queued_request_wakes_a_model_at_zero() -> None:
    for metric in TargetMetric:
        policy = tracking(metric)
        assert policy.decide(view(demand(0.0), count=0, least=0), None).count == 0
        assert policy.decide(view(demand(0.0, queued=1), count=0, least=0), None).count == 1


def test_a_running_request_keeps_one_replica() -> None:
    seen = demand(0.0, concurrency=1.0)
    assert tracking(TargetMetric.QUEUE, 4.0).decide(view(seen, count=1, least=0), None).count == 1
