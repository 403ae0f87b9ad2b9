"""A replica's engine in simulated time: leaps equal steps, events are complete and in order."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from policy.engine.batch_scheduler import BatchScheduler
from policy.engine.performance_model import BatchLimits, EngineModel, Timing
from sim.simulator.engine import EngineJob, TokenEvent, TokenEventKind, VirtualTimeEngine

MODEL = EngineModel(o=0.001, w=0.002, c=2e-5, g=1e-5, r=1e-5)
TIMING = Timing(limits=BatchLimits(max_num_batched_tokens=64, max_num_seqs=4, kv_tokens=2000), model=MODEL)


@dataclass
class Observed:
    """The result of a run: events, and the state of the engine between them."""

    events: list[TokenEvent] = field(default_factory=list)
    facts: list[object] = field(default_factory=list)
    submitted: dict[int, float] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    busy_s: float = 0.0


def play(seed: int) -> Observed:
    """A random engine with random arrivals, aborts, paces and crashes, until nothing is left."""
    rng = random.Random(seed)  # noqa: S311 - no secret is drawn
    limits = BatchLimits(
        max_num_batched_tokens=rng.choice([3, 16, 64]),
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        kv_tokens=rng.choice([130, 300, 2000]),
    )
    prefix, host = rng.choice([None, 100, 4096]), rng.choice([0, 100])
    timing = Timing(limits=limits, model=MODEL)
    engine = VirtualTimeEngine(timing, slots=2, adapter_load_s=0.05, prefix_tokens=prefix, host_tokens=host)
    observed, at = Observed(), 0.0
    for number in range(rng.randint(1, 40)):
        at += rng.choice([0.0, rng.expovariate(50.0), rng.expovariate(3.0)])
        observed.events += engine.advance(at)
        what = rng.random()
        if what < 0.75:
            blocks = (1, 2)[: rng.randint(0, 2)]
            adapter = rng.choice(["", "", "a", "b", "c", "d"])
            engine.submit(EngineJob(number, rng.randint(1, 60), rng.randint(1, 60), adapter, blocks), at)
            observed.submitted[number] = at
        elif what < 0.85:
            victim = rng.randrange(number + 1)
            if engine.abort(victim):
                observed.gone.add(victim)
        elif what < 0.95:
            engine.slow(rng.choice([0.5, 1.0, 2.0]), at)
        elif what < 0.97:
            observed.gone.update(engine.crash())
        assert 0.0 <= engine.kv_used <= 1.0
        assert engine.in_flight == engine.running + engine.waiting + engine.slots.deferred
        observed.facts += [
            engine.running,
            engine.waiting,
            engine.slots.deferred,
            engine.kv_used,
            engine.tokens,
        ]
        observed.facts += [engine.pending_tokens, engine.slots.loaded, engine.adapter_loads, engine.preempted]
    while (at := engine.next_at()) < math.inf:
        observed.events += engine.advance(at)
    assert (engine.in_flight, engine.kv_used, engine.pending_tokens) == (0, 0.0, 0)
    observed.busy_s = engine.busy_s
    return observed


@pytest.mark.slow
@given(st.integers(0, 2**32))
def test_a_leap_over_equal_steps_has_the_result_of_single_steps(seed: int) -> None:
    leapt = play(seed)
    with mock.patch.object(BatchScheduler, "alike", lambda _: 0):
        stepped = play(seed)
    assert leapt.facts == stepped.facts
    for one, other in zip(leapt.events, stepped.events, strict=True):
        assert (one.number, one.kind, one.cached_tokens) == (other.number, other.kind, other.cached_tokens)
        assert (one.at, one.first_at) == pytest.approx((other.at, other.first_at), rel=1e-9)
    assert leapt.busy_s == pytest.approx(stepped.busy_s, rel=1e-9)


@given(st.integers(0, 2**32))
def test_every_request_ends_once_and_events_are_in_order(seed: int) -> None:
    observed = play(seed)
    first = {event.number: event.at for event in observed.events if event.kind is TokenEventKind.FIRST}
    done = [event for event in observed.events if event.kind is TokenEventKind.DONE]
    assert sorted(event.number for event in done) == sorted(observed.submitted.keys() - observed.gone)
    assert len(observed.events) == len(first) + len(done)
    assert [event.at for event in observed.events] == sorted(event.at for event in observed.events)
    assert all(at > observed.submitted[number] for number, at in first.items())
    assert all(event.first_at == first[event.number] <= event.at for event in done)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 60)), min_size=1, max_size=12), st.booleans())
def test_results_do_not_depend_on_intermediate_calls(jobs: list[tuple[float, int]], often: bool) -> None:
    engine, fresh, at, events = VirtualTimeEngine(TIMING), VirtualTimeEngine(TIMING), 0.0, []
    for number, (gap, tokens) in enumerate(jobs):
        at += gap
        while often and (due := engine.next_at()) < at:
            events += engine.advance(due)
            assert engine.kv_used <= 1.0 and engine.tokens >= 0
        for each in (engine, fresh):
            each.submit(EngineJob(number, tokens, tokens), at)
    assert events + engine.advance(at + 1000.0) == fresh.advance(at + 1000.0)


@given(
    st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 40)), min_size=2, max_size=20),
    st.integers(1, 60),
    st.sampled_from([110, 200, 1000]),
)
def test_equal_prompts_keep_their_order(jobs: list[tuple[float, int]], prompt: int, kv_tokens: int) -> None:
    limits = BatchLimits(max_num_batched_tokens=32, max_num_seqs=4, kv_tokens=kv_tokens)
    engine, at = VirtualTimeEngine(Timing(limits=limits, model=MODEL)), 0.0
    for number, (gap, output) in enumerate(jobs):
        at += gap
        engine.submit(EngineJob(number, prompt, output), at)
    first = [event.number for event in engine.advance(at + 1000.0) if event.kind is TokenEventKind.FIRST]
    assert first == list(range(len(jobs)))


def drained(engine: VirtualTimeEngine) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while (at := engine.next_at()) < math.inf:
        events += engine.advance(at)
    return events


def test_the_latency_of_one_request_is_the_sum_of_its_steps() -> None:
    engine = VirtualTimeEngine(TIMING)
    engine.submit(EngineJob(7, 100, 11), 2.0)
    first, done = drained(engine)
    prefill = MODEL.step_time(64, 64, 1) + MODEL.step_time(36, 100, 1)
    decodes = sum(MODEL.step_time(1, 100 + i, 1) for i in range(1, 11))
    assert (first.kind, first.number, done.kind, done.number) == (
        TokenEventKind.FIRST,
        7,
        TokenEventKind.DONE,
        7,
    )
    assert first.at == pytest.approx(2.0 + prefill)
    assert done.at == pytest.approx(2.0 + prefill + decodes)
    assert done.first_at == first.at
    assert engine.tokens == 110
    assert engine.busy_s == pytest.approx(prefill + decodes)


def test_an_arrival_during_a_leap_joins_at_the_end_of_the_current_step() -> None:
    engine = VirtualTimeEngine(TIMING)
    engine.submit(EngineJob(1, 10, 50), 0.0)
    first = engine.next_at()
    while not (events := engine.advance(first)):
        first = engine.next_at()
    steps = [MODEL.step_time(1, 10 + i, 1) for i in range(1, 50)]
    engine.submit(EngineJob(2, 10, 1), events[0].at + sum(steps[:7]) + steps[7] / 2)
    joined = events[0].at + sum(steps[:8])
    done = drained(engine)[0]
    assert done.number == 2
    assert done.at == pytest.approx(joined + MODEL.step_time(11, 10 + 8 + 1 + 10, 2))


def test_simultaneous_arrivals_start_together() -> None:
    engine = VirtualTimeEngine(TIMING)
    for number in range(3):
        engine.submit(EngineJob(number, 10, 1), 1.0)
        assert engine.next_at() > 1.0
    assert [event.at for event in drained(engine)] == [pytest.approx(1.0 + MODEL.step_time(30, 30, 3))] * 6


def test_a_repeated_prompt_hits_the_prefix_cache() -> None:
    timing = Timing(
        limits=BatchLimits(max_num_batched_tokens=9000, max_num_seqs=4, kv_tokens=9000), model=MODEL
    )
    engine = VirtualTimeEngine(timing, slots=2, adapter_load_s=0.0, prefix_tokens=9000)
    cached = []
    for number, adapter in enumerate(["", "", "sql"]):
        engine.submit(EngineJob(number, 1100, 1, adapter, (1, 2, 3 + number)), float(number))
        events = engine.advance(number + 1.0)
        cached.append([event.cached_tokens for event in events])
    assert cached == [[0, 0], [1024, 1024], [0, 0]]
    assert engine.tokens == 1100 + 76 + 1100


def test_a_preempted_request_does_not_hit_its_own_prefix() -> None:
    timing = Timing(
        limits=BatchLimits(max_num_batched_tokens=2048, max_num_seqs=4, kv_tokens=2100), model=MODEL
    )
    events = []
    for prefix_tokens in (2100, None):
        engine = VirtualTimeEngine(timing, prefix_tokens=prefix_tokens)
        engine.submit(EngineJob(0, 1024, 60, "", (1, 2)), 0.0)
        engine.submit(EngineJob(1, 1024, 60, "", (3, 4)), 0.0)
        events.append(drained(engine))
        assert engine.preempted and engine.tokens > 2 * 1024 + 1024 + 2 * 59
    assert events[0] == events[1]


def test_running_requests_evict_shared_prefixes() -> None:
    timing = Timing(
        limits=BatchLimits(max_num_batched_tokens=2048, max_num_seqs=4, kv_tokens=2048), model=MODEL
    )
    cached = []
    for other in (1000, 1100):
        engine = VirtualTimeEngine(timing, prefix_tokens=2048)
        for number, (tokens, blocks) in enumerate([(1024, (1, 2)), (other, (3, 4)), (1200, (1, 2))]):
            engine.submit(EngineJob(number, tokens, 1, "", blocks), float(number))
            events = engine.advance(number + 1.0)
        cached.append(events[-1].cached_tokens)
    assert cached == [1024, 512]


def test_an_adapter_load_blocks_steps_and_others_overtake_the_waiting_request() -> None:
    engine = VirtualTimeEngine(TIMING, slots=1, adapter_load_s=0.5)
    engine.submit(EngineJob(1, 10, 100, "a"), 0.0)
    assert (engine.slots.deferred, engine.running, engine.slots.loaded) == (1, 0, ())
    engine.catch_up(0.4)
    assert (engine.slots.loaded, engine.adapter_loads) == ((), 1)
    engine.submit(EngineJob(2, 10, 1), 0.4)
    engine.catch_up(0.5)
    engine.submit(EngineJob(3, 10, 1, "b"), 0.51)
    events = drained(engine)
    assert [event.number for event in events] == [2, 1, 2, 1, 3, 3]
    assert [event.kind for event in events] == [TokenEventKind.FIRST] * 2 + [TokenEventKind.DONE] * 2 + [
        TokenEventKind.FIRST,
        TokenEventKind.DONE,
    ]
    step = MODEL.step_time(20, 20, 2)
    assert events[0].at == events[1].at == pytest.approx(0.5 + step)
    # The slot is in use until the first request ends; then the load blocks all steps.
    assert events[4].at == pytest.approx(events[3].at + 0.5 + MODEL.step_time(10, 10, 1))
    assert engine.slots.loaded == ("b",)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (EngineJob(0, 10, 10), "already here"),
        (EngineJob(1, 0, 10), "nothing"),
        (EngineJob(1, 10, 0), "nothing"),
        (EngineJob(1, 1990, 12), "needs 2001 of 2000"),
        (EngineJob(1, 10, 10, "sql"), "no slots"),
    ],
)
def test_an_invalid_request_is_refused(job: EngineJob, reason: str) -> None:
    engine = VirtualTimeEngine(TIMING)
    engine.submit(EngineJob(0, 10, 10), 0.0)
    with pytest.raises(ValueError, match=reason):
        engine.submit(job, 0.0)
    assert engine.in_flight == 1
    assert {event.number for event in drained(engine)} == {0}


def test_time_in_the_past_and_missing_coefficients_are_refused() -> None:
    engine = VirtualTimeEngine(TIMING)
    engine.catch_up(2.0)
    with pytest.raises(ValueError, match=r"1\.0 s after 2\.0 s"):
        engine.advance(1.0)
    with pytest.raises(ValueError, match="coefficients"):
        VirtualTimeEngine(Timing(limits=TIMING.limits))


# One request at a time, whose steps take STEP_S each: a queue with a known mean wait.
STEP_S = 0.002


def served(arrivals: NDArray[np.float64], steps: NDArray[np.int64], step_s: float) -> NDArray[np.float64]:
    limits = BatchLimits(max_num_batched_tokens=1, max_num_seqs=1, kv_tokens=10**9)
    model = EngineModel(o=step_s, w=0.0, c=0.0, g=0.0, r=0.0)
    engine = VirtualTimeEngine(Timing(limits=limits, model=model))
    for number, (at, tokens) in enumerate(zip(arrivals.tolist(), steps.tolist(), strict=True)):
        engine.submit(EngineJob(number, 1, tokens), at)
    done = np.zeros(len(arrivals))
    for event in engine.advance(float(arrivals[-1]) + 1e6):
        done[event.number] = event.at
    waits: NDArray[np.float64] = done - arrivals - steps * step_s
    return waits


def mean_wait(
    waits: NDArray[np.float64], service: NDArray[np.float64], gaps: NDArray[np.float64], moments: list[float]
) -> float:
    """The mean of ``waits`` with control variates, regressed over the means of batches."""
    known = [service - moments[0], service**2 - moments[1], gaps - moments[2], gaps**2 - moments[3]]
    known += [waits * known[0], waits * known[2]]
    batches = np.column_stack([each.reshape(-1, 400).mean(axis=1) for each in known if each.any()])
    design = np.column_stack([np.ones(len(batches)), batches])
    return float(np.linalg.lstsq(design, waits.reshape(-1, 400).mean(axis=1))[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8])
@pytest.mark.parametrize("spread", [0, 1], ids=["M/D/1", "M/M/1"])
def test_mean_waits_agree_with_queueing_theory(spread: int, load: float) -> None:
    rng = np.random.default_rng(1)
    count = 60_000
    gaps = rng.exponential(1.0 / load, count + 1)
    step_s = STEP_S if spread else 1.0
    steps = rng.geometric(step_s, count) if spread else np.ones(count, np.int64)
    waits = served(np.cumsum(gaps[:-1]), steps, step_s)
    moments = [1.0, 1.0 + spread, 1.0 / load, 2.0 / load**2]
    wait = mean_wait(waits, np.asarray(steps * step_s), gaps[1:], moments)
    assert wait == pytest.approx((1 + spread) / 2 * load / (1.0 - load), rel=0.02)
    # And each wait by Lindley's recursion: wait and service of the one before, less the gap.
    expected = np.maximum(0.0, waits[:-1] + steps[:-1] * step_s - gaps[1:-1])
    assert waits[1:] == pytest.approx(expected, abs=1e-6)


def test_a_hit_in_host_memory_costs_its_copy() -> None:
    def last(chains: list[tuple[int, ...]], host_tokens: int) -> tuple[float, int]:
        """The time to first token and the cached tokens of the last of prompts that run one by one."""
        engine, at = VirtualTimeEngine(TIMING, prefix_tokens=2000, host_tokens=host_tokens), 0.0
        for number, blocks in enumerate(chains):
            engine.submit(EngineJob(number, 1100, 1, "", blocks), at)
            begun, [first, _] = at, engine.advance(at + 100.0)
            at += 100.0
        return first.at - begun, first.cached_tokens

    home, others = (1, 2), [(3, 4), (5, 6)]
    device_s, device = last([home, home], 4096)
    host_s, host = last([home, *others, home], 4096)
    prefill_s, none = last([home, *others, home], 0)
    assert (device, host, none) == (1024, 1024, 0)
    assert device_s < host_s < prefill_s
    assert host_s - device_s == pytest.approx(MODEL.copy_s(1024))
