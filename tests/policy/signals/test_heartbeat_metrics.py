"""What replicas tell with their beats, as the figures of those that serve."""

from __future__ import annotations

from typing import Any

import pytest

from policy.signals.aggregator import SignalAggregator
from policy.signals.heartbeat_metrics import SILENT_S, ReplicaMetrics
from policy.signals.types import ReplicaSample
from policy.types import Load, Replica, ReplicaPhase
from policy.wire.heartbeat import Heartbeat
from policy.wire.reports import EngineReport, PowerReport

T = 1000.0


def beat(
    name: str = "r1",
    *,
    state: ReplicaPhase = ReplicaPhase.READY,
    incarnation: int = 0,
    engine: EngineReport | None = None,
    power: PowerReport | None = None,
    **load: Any,
) -> Heartbeat:
    replica = Replica(
        id=name, model="m", shape="s", generation=1, state=state, incarnation=incarnation, pid=7,
        load=Load(at=0.0, **load),
    )  # fmt: skip
    return Heartbeat(replica=replica, engine=engine, power=power)


def taken(*beats: Heartbeat) -> ReplicaMetrics:
    """The metrics after ``beats`` at :data:`T` and each second after it."""
    presence = ReplicaMetrics()
    for i, each in enumerate(beats):
        presence.take(each, T + i)
    return presence


def only(presence: ReplicaMetrics, at: float) -> ReplicaSample:
    (figures,) = presence.figures("m", at)
    return figures


def test_a_replica_says_its_load_and_how_old_that_is() -> None:
    seen = only(taken(beat(running=3, waiting=2, kv_used=0.4)), T + 1.5)
    assert (seen.id, seen.age_s, seen.running, seen.waiting, seen.kv_used) == ("r1", 1.5, 3, 2, 0.4)
    assert (seen.tokens_per_s, seen.slowness, seen.watts, seen.celsius) == (0.0, 1.0, None, None)


def test_tokens_and_preemptions_a_second_over_the_last_seconds() -> None:
    presence = ReplicaMetrics()
    for half in range(40):
        tokens = 50 * half if half < 20 else 1000 + 150 * (half - 20)
        presence.take(beat(tokens=tokens, engine=EngineReport(preempted=half // 2)), T + half / 2)
    seen = only(presence, T + 19.5)
    assert seen.tokens_per_s == pytest.approx(300.0)
    assert seen.preempted_per_s == pytest.approx(1.0, rel=0.2)


def test_beats_in_a_burst_are_one_mark() -> None:
    presence = ReplicaMetrics()
    for i in range(1000):
        presence.take(beat(tokens=i), T + i / 1000)
    assert only(presence, T + 1).tokens_per_s == pytest.approx(1000.0, rel=0.02)
    assert len(presence._replicas["r1"].marks) <= 4


def test_an_engine_that_started_anew_counts_from_its_start() -> None:
    before = beat(tokens=9_000_000, engine=EngineReport(preempted=50))
    presence = taken(before, beat(tokens=100, incarnation=1))
    assert only(presence, T + 1).tokens_per_s == 0.0
    presence.take(beat(tokens=300, incarnation=1), T + 2)
    assert only(presence, T + 2).tokens_per_s == 200.0


def test_what_an_engine_counted_before_it_was_heard_came_not_just_now() -> None:
    presence = taken(beat(), beat(engine=EngineReport(preempted=500)))
    assert only(presence, T + 1).preempted_per_s == 0.0
    presence.take(beat(engine=EngineReport(preempted=502)), T + 2)
    assert only(presence, T + 2).preempted_per_s == 2.0


def test_the_engines_and_the_cards_last_word_stands_until_the_next() -> None:
    power = PowerReport(watts=300.0, celsius=71.0, throttled="sw_power_cap")
    seen = only(taken(beat(engine=EngineReport(deferred=2), power=power), beat()), T + 1)
    assert (seen.deferred, seen.watts, seen.celsius, seen.throttled) == (2, 300.0, 71.0, "sw_power_cap")


def test_only_those_that_serve_are_figures() -> None:
    presence = ReplicaMetrics()
    presence.take(beat("b"), T)
    presence.take(beat("a"), T)
    presence.take(beat("starts", state=ReplicaPhase.STARTING), T)
    presence.take(beat("leaves", state=ReplicaPhase.DRAINING), T)
    assert [one.id for one in presence.figures("m", T)] == ["a", "b"]
    assert presence.figures("other", T) == ()
    presence.take(beat("b", state=ReplicaPhase.STOPPED), T + 1)
    assert [one.id for one in presence.figures("m", T + 1)] == ["a"]


def test_one_that_is_silent_for_long_is_gone() -> None:
    gathering = SignalAggregator()
    gathering.take_beat(beat("silent"), T)
    assert len(gathering.signals("m", T + SILENT_S).replicas) == 1
    assert gathering.signals("m", T + SILENT_S + 1).replicas == ()


@pytest.mark.parametrize(
    ("power", "said"),
    [
        (PowerReport(watts=0.0, xid=79, card="GPU 3"), "XID 79 on GPU 3"),
        (PowerReport(watts=0.0, xid=79, throttled="heat"), "XID 79 on a card, heat"),
        (PowerReport(watts=0.0, xid=31, card="GPU 3"), ""),
    ],
)
def test_the_error_of_a_card_is_told_with_what_slows_it(power: PowerReport, said: str) -> None:
    assert only(taken(beat(power=power)), T).throttled == said
