"""Step times of an engine: measured, pooled and reported once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from policy.engine.performance_model import BatchLimits, EngineModel
from policy.engine.step_samples import StepSample
from policy.types import Replica, ReplicaLoad, ReplicaPhase
from policy.wire.controller_reports import EngineReport
from policy.wire.heartbeat import Heartbeat
from serve.engine.sim.metrics import SimEngineMetrics
from serve.engine.sim.pseudo_tokenizer import GeneratedText, TokenizedPrompt
from serve.engine.sim.step_loop import StepLoop
from serve.engine.step_stats import MOST, StepStats, merge


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    steps = StepStats()
    steps.ended(10.0, 100, 100, 1, goes_on=True)
    # The start of the first step is unknown.
    assert steps.take() == ()
    steps.ended(10.25, 1, 101, 1, goes_on=True)
    assert steps.take() == (StepSample(1, 1, 101, 1, 0.25),)
    assert steps.take() == ()


def test_an_idle_gap_is_no_step() -> None:
    steps = StepStats()
    steps.ended(10.0, 4, 100, 4, goes_on=True)
    steps.ended(10.5, 4, 104, 4, goes_on=False)
    steps.ended(99.0, 50, 50, 1, goes_on=True)
    steps.ended(99.1, 0, 50, 0, goes_on=True)
    steps.ended(99.2, 1, 51, 1, goes_on=True)
    assert [(each.count, each.tokens, each.seconds) for each in steps.take()] == [(1, 1, 0.1), (1, 4, 0.5)]


def test_time_between_two_steps_belongs_to_neither() -> None:
    steps = StepStats()
    steps.ended(10.0, 4, 100, 4, goes_on=True)
    steps.ended(10.5, 4, 104, 4, goes_on=True)
    steps.broken()
    steps.ended(13.0, 4, 108, 4, goes_on=True)
    steps.ended(13.5, 4, 112, 4, goes_on=True)
    assert [(each.count, each.seconds) for each in steps.take()] == [(2, 0.5)]


def test_similar_steps_are_pooled_and_stalls_are_not() -> None:
    steps, at = StepStats(), 0.0
    for seconds in [0.0, *[0.1] * 9, 2.0, *[0.1] * 10]:
        at += seconds
        steps.ended(at, 4, 600, 4, goes_on=True)
    assert [(each.count, each.seconds) for each in steps.take()] == [(19, 0.1), (1, 2.0)]


def test_a_report_of_many_steps_stays_small() -> None:
    steps, at = StepStats(), 0.0
    for i in range(5000):
        at += 0.0123456789 * (1 + i % 50)
        steps.ended(at, 1 + i % 8000, 1000.0 * (i % 400) / 3, 1 + i % 250, goes_on=True)
    report = EngineReport(preempted=12, deferred=3, steps=steps.take())
    assert len(report.steps) <= MOST
    assert sum(each.count for each in report.steps) == 4999
    replica = Replica(
        id="some-model-some-shape-g1-abcdef", model="some-model", shape="some-shape", generation=1,
        state=ReplicaPhase.READY, load=ReplicaLoad(at=1.7e9), url="http://10.0.0.1:40123",
        adapters=("sql@" + "a" * 12,),
    )  # fmt: skip
    assert len(msgspec.json.encode(Heartbeat(replica=replica, engine=report))) < 2048


def test_unsent_reports_are_merged() -> None:
    one = EngineReport(preempted=1, deferred=5, steps=(StepSample(3, 4.0, 600.0, 4.0, 0.1),))
    other = EngineReport(preempted=2, steps=(StepSample(1, 4.0, 600.0, 4.0, 0.12),))
    assert merge(None, one) is merge(one, None) is one
    assert merge(None, None) is None
    assert merge(one, other) == EngineReport(preempted=2, steps=(StepSample(4, 4.0, 600.0, 4.0, 0.105),))


async def finish(loop: StepLoop, prompt: int, output: int) -> None:
    outputs = [GeneratedText(deltas=["a"] * output, finish_reason="length")]
    await loop.submit("m", [TokenizedPrompt.of_ids(range(prompt))], outputs, salt=0).finish()


MODEL = EngineModel(o=0.002, w=0.002, c=1e-5, g=0.0, r=0.0)


async def test_the_simulated_engine_reports_its_real_steps() -> None:
    limits = BatchLimits(max_num_batched_tokens=64, max_num_seqs=8, kv_tokens=1000)
    loop = StepLoop(MODEL, limits, 1.0, SimEngineMetrics("m"))
    try:
        await asyncio.gather(finish(loop, 100, 20), finish(loop, 10, 20))
        samples = loop.took.take()
    finally:
        await loop.close()
    # Two chunks of the longer prompt, of which the first began the busy time, then decodes.
    assert sum(each.count for each in samples) == loop.stats().steps - 1
    assert sum(each.count * each.tokens for each in samples) == pytest.approx(loop.stats().tokens - 64, abs=5)
    assert max(each.running for each in samples) == 2
    assert all(each.seconds > 0.0 for each in samples)
    assert max(each.kv_tokens for each in samples) > 110


async def test_the_simulated_engine_counts_preemptions() -> None:
    limits = BatchLimits(max_num_batched_tokens=64, max_num_seqs=8, kv_tokens=40)
    loop = StepLoop(MODEL, limits, 1e6, SimEngineMetrics("m"))
    try:
        await asyncio.gather(finish(loop, 18, 10), finish(loop, 20, 4))
        assert loop.stats().preempted == 1
    finally:
        await loop.close()
