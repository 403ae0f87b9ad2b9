"""Tokens in use against the capacity of a replica, which is learned while requests wait."""

from __future__ import annotations

import pytest

from policy.engine.replica_capacity import Capability
from policy.scaling.policies.token_saturation import TokenSaturation
from policy.signals.types import ModelDemand, ReplicaSample
from tests.policy.scaling.views import demand, replicas, view

POLICY = TokenSaturation()


def decided(used: float, count: int, *, seen: ModelDemand | None = None, **more: object) -> int:
    """The count with ``used`` of 100,000 tokens in use per replica, of which 80,000 are its capacity."""
    figures = replicas(count, kv_used=used)
    return POLICY.decide(view(seen or demand(1.0), count=count, figures=figures, **more), None).count  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("used", "count", "proposed"),
    [
        (0.68, 4, 4),  # 0.85 of the capacity
        (0.69, 4, 5),
        (0.80, 4, 5),
        (0.56, 4, 4),  # 0.70
        (0.55, 4, 4),  # less than one replica is unused
        (0.41, 4, 3),
        (0.28, 4, 2),
        (0.0, 4, 1),
    ],
)
def test_the_count_changes_beyond_the_thresholds_only(used: float, count: int, proposed: int) -> None:
    assert decided(used, count) == proposed


def test_a_waiting_request_counts_with_half_of_its_output_tokens() -> None:
    # 2 * 30,000 in use and 100 * 1,100 waiting are 170,000 of 68,000 each.
    assert decided(0.3, 2, seen=demand(1.0, queued=100)) == 3


def test_a_starting_replica_prevents_scale_down_and_repeated_scale_up() -> None:
    figures = replicas(3, kv_used=0.1)
    assert POLICY.decide(view(demand(1.0), count=4, starting_s=(9.0,), figures=figures), None).count == 4
    full = replicas(2, kv_used=0.9)
    assert POLICY.decide(view(demand(1.0), count=3, starting_s=(9.0,), figures=full), None).count == 3


def queueing(used: float, waiting: int, deferred: int = 0) -> tuple[ReplicaSample, ...]:
    return replicas(2, kv_used=used, waiting=waiting, deferred=deferred)


def test_capacity_in_tokens_is_learned_while_requests_wait() -> None:
    seen = view(demand(1.0), count=2, figures=queueing(0.4, 5))
    learned = POLICY.decide(seen, None)
    assert learned.memory == {"k2": {"multi-replica": pytest.approx(40_000)}}
    after = view(demand(1.0), count=2, figures=replicas(2, kv_used=0.4))
    assert POLICY.decide(after, None).count == 2
    assert POLICY.decide(after, learned.memory).count == 3  # 80,000 of 0.85 * 40,000
    updated = POLICY.decide(view(demand(1.0), count=2, figures=queueing(0.5, 9)), learned.memory)
    assert updated.memory == {"k2": {"multi-replica": pytest.approx(43_000)}}


@pytest.mark.parametrize("figures", [queueing(0.4, 4), queueing(0.4, 9, deferred=5), queueing(0.05, 9)])
def test_waits_for_other_reasons_do_not_change_the_capacity(figures: tuple[ReplicaSample, ...]) -> None:
    assert POLICY.decide(view(demand(1.0), count=2, figures=figures), None).memory == {"k2": {}}


def test_without_a_known_cache_size_the_count_stays() -> None:
    unknown = Capability(mu=4.0, mu_max=5.0)
    proposal = POLICY.decide(view(demand(900.0, queued=900), capability=unknown), {"k2": {"other": 1.0}})
    assert (proposal.count, proposal.memory) == (2, {"k2": {"other": 1.0}})
    assert proposal.reason == "the size of the KV cache is unknown"
