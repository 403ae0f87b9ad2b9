"""The prefill in a cost estimate: the request's own part of the steps that it shares with earlier prompts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.engine.performance_model import BatchLimits, Timing
from policy.engine.prefill_estimate import GENERIC, StepTable
from policy.request import Request
from policy.routing.cost import Candidate, estimate
from policy.routing.replica_state import ReplicaState


@given(
    in_flight=st.integers(0, 400),
    pending=st.integers(0, 100_000),
    kv_used=st.floats(0, 1),
    uncached=st.integers(1, 100_000),
    turned_at=st.floats(-1, 1),
)
def test_the_prefill_of_an_estimate_is_that_of_the_step_table(
    in_flight: int, pending: int, kv_used: float, uncached: int, turned_at: float
) -> None:
    site = ReplicaState(1, None, GENERIC, 8)
    site.count(in_flight, pending, kv_used)
    candidate = Candidate("r", 1, in_flight=in_flight, pending_tokens=pending, turned_at=turned_at)
    _, _, _, _, own, _ = estimate(Request("m"), candidate, site, uncached, 1.0, 0.0)
    pace = site.pace
    if not site.ahead_s:
        before = 0
    elif turned_at > site.seen_at:  # all pending prompts are in the same steps
        before = pending
    else:  # the first step is in progress
        before = site.rest
    alone = pace.prefill_s(before, site.kv_tokens, site.running) if before else 0.0
    expected = pace.prefill_s(before + uncached, site.kv_tokens, site.running) - alone
    assert own == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("running", [57, 64, 100, 256])
def test_a_prefill_beside_more_requests_than_a_batch_has_tokens_is_estimated(running: int) -> None:
    limits = BatchLimits(max_num_batched_tokens=64, max_num_seqs=256, kv_tokens=0)
    table = StepTable(Timing(limits=limits, model=GENERIC.model))
    assert table.prefill_s(6, 0.0, running) > table.prefill_s(5, 0.0, 0)


def test_replicas_with_equal_timings_share_a_step_table() -> None:
    limits = BatchLimits(max_num_batched_tokens=64, max_num_seqs=256, kv_tokens=0)
    sites = [ReplicaState(i, Timing(limits=limits, model=GENERIC.model), GENERIC, 8) for i in range(2)]
    assert sites[0].pace is sites[1].pace
    sites[1].time(Timing(limits=msgspec.structs.replace(limits, kv_tokens=9), model=GENERIC.model), GENERIC)
    assert (sites[0].pace.kv_tokens, sites[1].pace.kv_tokens) == (0, 9)
