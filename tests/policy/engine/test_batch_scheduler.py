"""Invariants of continuous batching: conserved tokens, bounded KV, deterministic steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.engine.batch_scheduler import BatchScheduler, EngineRequest, StepResult, StepTimes
from policy.engine.performance_model import BatchLimits, EngineModel
from policy.engine.prefix_cache import PrefixCache

MODEL = EngineModel(o=0.001, w=0.002, c=2e-5, g=1e-7, r=1e-5)
WIDE = BatchLimits(max_num_batched_tokens=100, max_num_seqs=8, kv_tokens=1000)

requests = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30), st.floats(0, 0.99), st.integers(0, 20)),
    min_size=1,
    max_size=12,
)
limits = st.builds(
    BatchLimits,
    max_num_batched_tokens=st.integers(1, 64),
    max_num_seqs=st.integers(1, 8),
    kv_tokens=st.integers(90, 300),
)


Asked = list[tuple[int, int, float, int]]


def loaded(asked: Asked, bounds: BatchLimits) -> BatchScheduler:
    """A scheduler to which all of ``asked`` were submitted."""
    scheduler = BatchScheduler(MODEL, bounds)
    for index, (prompt, output, hit, _) in enumerate(asked):
        scheduler.submit(EngineRequest(str(index), prompt, output, int(prompt * hit)))
    return scheduler


def drain(scheduler: BatchScheduler) -> list[StepResult]:
    results = []
    while scheduler.running or scheduler.waiting:
        results.append(scheduler.step())
    return results


@pytest.mark.slow
@given(requests, limits)
def test_tokens_are_conserved_in_causal_order_within_the_limits(asked: Asked, bounds: BatchLimits) -> None:
    scheduler = BatchScheduler(MODEL, bounds)
    produced: dict[str, int] = {}
    finished: set[str] = set()
    wanted: dict[str, int] = {}
    recomputed = scheduled = 0
    at_step = 0
    pending = sorted(enumerate(asked), key=lambda item: item[1][3])
    while pending or scheduler.running or scheduler.waiting:
        while pending and pending[0][1][3] <= at_step:
            index, (prompt, output, hit, _) = pending.pop(0)
            cached = int(prompt * hit)
            scheduler.submit(EngineRequest(str(index), prompt, output, cached))
            wanted[str(index)] = output
            recomputed += prompt - cached + output - 1
        result = scheduler.step()
        at_step += 1
        scheduled += result.scheduled
        assert (result.scheduled > 0) == (result.duration_s > 0)
        assert result.scheduled <= bounds.max_num_batched_tokens
        assert result.running <= bounds.max_num_seqs
        assert 0 <= result.kv_used <= bounds.kv_tokens
        assert set(result.finished) <= set(result.tokens)
        for request_id, count in result.tokens.items():
            assert request_id not in finished
            produced[request_id] = produced.get(request_id, 0) + count
        finished |= set(result.finished)
    assert produced == wanted
    assert finished == set(wanted)
    assert scheduler.kv_used == 0
    # Preemption computes tokens again, and nothing is computed less than once.
    assert scheduled >= recomputed


@pytest.mark.slow
@given(requests, limits, st.sets(st.integers(0, 11)), st.integers(0, 15))
def test_an_abort_frees_everything_at_once(
    asked: Asked, bounds: BatchLimits, gone: set[int], after: int
) -> None:
    scheduler = loaded(asked, bounds)
    for _ in range(after):
        scheduler.step()
    dropped = {str(index) for index in gone if scheduler.abort(str(index))}
    assert not any(scheduler.abort(request_id) for request_id in dropped)
    for result in drain(scheduler):
        assert not dropped & set(result.tokens)
    assert (scheduler.kv_used, scheduler.running, scheduler.waiting) == (0, 0, 0)


def test_golden_prompt_in_chunks_then_decodes() -> None:
    scheduler = BatchScheduler(MODEL, WIDE)
    scheduler.submit(EngineRequest("a", 150, 3))
    scheduler.submit(EngineRequest("b", 20, 2))
    results = drain(scheduler)
    assert [(r.scheduled, tuple(r.tokens), r.finished, r.kv_used) for r in results] == [
        (100, (), (), 100),
        (70, ("a", "b"), (), 170),
        (2, ("a", "b"), ("b",), 151),
        (1, ("a",), ("a",), 0),
    ]
    assert [r.duration_s for r in results] == [
        pytest.approx(MODEL.step_time(n, kv, running))
        for n, kv, running in ((100, 100, 1), (70, 170, 2), (2, 172, 2), (1, 152, 1))
    ]


def test_golden_preemption_takes_the_youngest_and_recomputes_it() -> None:
    scheduler = BatchScheduler(MODEL, BatchLimits(max_num_batched_tokens=100, max_num_seqs=8, kv_tokens=40))
    scheduler.submit(EngineRequest("old", 18, 10))
    scheduler.submit(EngineRequest("young", 20, 4))
    results = drain(scheduler)
    assert [r.preempted for r in results if r.preempted] == [("young",)]
    preempted_at = next(i for i, r in enumerate(results) if r.preempted)
    assert results[preempted_at].tokens == {"old": 1}
    finished = [r.finished for r in results if r.finished]
    assert finished == [("old",), ("young",)]


def test_cached_tokens_shorten_the_prefill_but_hold_kv() -> None:
    scheduler = BatchScheduler(MODEL, WIDE)
    scheduler.submit(EngineRequest("a", 90, 2, cached_tokens=80))
    result = scheduler.step()
    assert (result.scheduled, result.kv_used, result.tokens) == (10, 90, {"a": 1})


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (EngineRequest("a", 0, 1), "nothing"),
        (EngineRequest("a", 5, 0), "nothing"),
        (EngineRequest("a", 5, 1, cached_tokens=5), "nothing left"),
        (EngineRequest("a", 900, 102), "needs 1001 of 1000"),
        (EngineRequest("here", 1, 1), "already here"),
    ],
)
def test_impossible_requests_are_refused(request_: EngineRequest, reason: str) -> None:
    scheduler = BatchScheduler(MODEL, WIDE)
    scheduler.submit(EngineRequest("here", 1, 1))
    with pytest.raises(ValueError, match=reason):
        scheduler.submit(request_)
    assert scheduler.waiting == 1


@pytest.mark.slow
@given(requests, limits, st.integers(0, 40), st.data())
def test_a_leap_equals_its_steps(asked: Asked, bounds: BatchLimits, before: int, data: st.DataObject) -> None:
    stepped, leapt = loaded(asked, bounds), loaded(asked, bounds)
    for scheduler in (stepped, leapt):
        for _ in range(before):
            scheduler.step()
    while not leapt.alike() and leapt.running + leapt.waiting:
        assert leapt.step() == stepped.step()
    steps = data.draw(st.integers(0, leapt.alike()))
    pace = leapt.pace()
    leapt.leap(steps)
    taken = [stepped.step() for _ in range(steps)]
    assert not any(result.first or result.finished or result.preempted for result in taken)
    assert all(result.scheduled == len(result.tokens) == leapt.running for result in taken)
    assert pace.lasts(steps) == pytest.approx(sum(result.duration_s for result in taken), rel=1e-9)
    assert (leapt.kv_used, leapt.running, leapt.waiting) == (
        stepped.kv_used,
        stepped.running,
        stepped.waiting,
    )
    assert drain(leapt) == drain(stepped)


@given(st.floats(1e-6, 1.0), st.floats(0.0, 1.0), st.integers(0, 1000), st.floats(0.0, 0.99))
def test_step_times_give_the_ended_step_count(step_s: float, growth: float, steps: int, part: float) -> None:
    pace = StepTimes(step_s, growth * step_s)
    elapsed_s = pace.lasts(steps) + part * (pace.lasts(steps + 1) - pace.lasts(steps))
    assert abs(pace.ended(elapsed_s) - steps) <= 1


def test_steps_are_alike_until_the_kv_cache_overflows() -> None:
    scheduler = BatchScheduler(MODEL, BatchLimits(max_num_batched_tokens=100, max_num_seqs=8, kv_tokens=50))
    for name in ("a", "b"):
        scheduler.submit(EngineRequest(name, 20, 30))
    scheduler.submit(EngineRequest("c", 20, 2))
    assert scheduler.step().waiting == 1
    assert scheduler.alike() == 5
    scheduler.leap(5)
    assert scheduler.step().preempted == ("b",)


def test_the_prefix_cache_is_looked_up_when_a_request_is_admitted() -> None:
    limits = BatchLimits(max_num_batched_tokens=100, max_num_seqs=1, kv_tokens=1000)
    scheduler = BatchScheduler(MODEL, limits, PrefixCache(1000))
    for name in ("a", "b"):
        scheduler.submit(EngineRequest(name, 90, 1, blocks=tuple(range(5))))
    assert scheduler.prefilling == 180, "nothing is cached yet"
    assert [scheduler.step().scheduled for _ in range(2)] == [90, 10]


def test_running_requests_take_memory_from_the_prefix_cache() -> None:
    limits = BatchLimits(max_num_batched_tokens=100, max_num_seqs=1, kv_tokens=100)
    scheduler = BatchScheduler(MODEL, limits, PrefixCache(100))
    for name, blocks in (("a", (1, 2, 3, 4, 5)), ("b", (6, 7, 8)), ("c", (1, 2, 3, 4, 5))):
        scheduler.submit(EngineRequest(name, 16 * len(blocks) + 1, 1, blocks=blocks))
    # b needs 49 tokens beside the 80 that a left: the last two blocks of a are evicted.
    assert [scheduler.step().scheduled for _ in range(3)] == [81, 49, 81 - 3 * 16]
