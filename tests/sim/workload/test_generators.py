"""Properties of generated workloads: rates, bursts, lengths, popularity and conversations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import mean, pstdev
from typing import Any

import msgspec
import pytest

from policy.wire.capture import BLOCK_TOKENS
from sim.arrivals import Arrival
from sim.workload.generators.arrivals import Diurnal, FlashCrowd, Ramp, RateShape, arrival_times
from sim.workload.generators.generate import Conversations, ConversationState, GeneratedWorkload, generate
from sim.workload.generators.request_distributions import (
    AdapterPopularity,
    LengthDistribution,
    sample_adapter,
    sample_length,
)


def rng(seed: int = 1) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a reproducible workload


def instants_of(pace: RateShape, until_s: float = 4000.0) -> list[float]:
    return list(arrival_times(pace, rng(), until_s))


def no_trace(path: str) -> Iterable[int]:
    raise AssertionError(path)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_their_rate_and_their_burstiness(cv: float) -> None:
    made = instants_of(RateShape(rate=3.0, cv=cv))
    gaps = [after - before for before, after in pairwise(made)]
    assert len(made) == pytest.approx(12_000, rel=0.02 + 0.03 * cv)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.06, abs=0.01)
    assert made[0] >= 0.0 and made[-1] < 4000.0


DAY = {"diurnal": Diurnal(period_s=1000.0, swing=0.5, peak_s=250.0)}
RISE = {"ramp": Ramp(factor=4.0, from_s=100.0, rise_s=100.0)}


def flash(**more: float) -> dict[str, tuple[FlashCrowd, ...]]:
    return {"flashes": (FlashCrowd(at_s=100.0, factor=5.0, hold_s=50.0, **more),)}


@pytest.mark.parametrize(
    ("shapes", "at", "rate"),
    [
        (DAY, 250.0, 3.0),
        (DAY, 1750.0, 1.0),
        (RISE, 50.0, 2.0),
        (RISE, 150.0, 5.0),
        ({"ramp": Ramp(factor=0.0, from_s=100.0, rise_s=100.0)}, 300.0, 0.0),
        (flash(), 99.9, 2.0),
        (flash(), 100.0, 10.0),
        (flash(), 150.0, 2.0),
        (flash(rise_s=10.0), 95.0, 6.0),
        (flash(fall_s=10.0), 155.0, 6.0),
        (flash() | {"ramp": Ramp(factor=2.0, rise_s=1.0)}, 110.0, 20.0),
    ],
)
def test_the_rate_is_that_of_its_shapes(shapes: dict[str, Any], at: float, rate: float) -> None:
    assert RateShape(rate=2.0, **shapes).at(at) == pytest.approx(rate)


@pytest.mark.parametrize(
    "pace",
    [
        RateShape(rate=4.0, diurnal=Diurnal(period_s=2000.0, swing=1.0, peak_s=500.0)),
        RateShape(rate=4.0, cv=2.0, ramp=Ramp(factor=5.0, rise_s=3000.0)),
        RateShape(
            rate=4.0, flashes=(FlashCrowd(at_s=1000.0, factor=8.0, hold_s=500.0, rise_s=100.0, fall_s=300.0),)
        ),
        RateShape(rate=4.0, ramp=Ramp(factor=0.0, rise_s=1000.0)),
    ],
)
def test_the_count_of_arrivals_follows_the_rate(pace: RateShape) -> None:
    counts = Counter(int(at // 500) for at in instants_of(pace))
    for part in range(8):
        due = sum(pace.at(part * 500 + i + 0.5) for i in range(500))
        # Five standard deviations of a count, which at cv is about cv times as wide as Poisson's.
        assert counts[part] == pytest.approx(due, abs=5.0 * pace.cv * max(1.0, due) ** 0.5)


def test_a_rate_that_ends_within_an_integration_cell_keeps_its_arrivals() -> None:
    assert instants_of(RateShape(rate=2.0, cv=0.0), until_s=2.6) == pytest.approx(
        [0.5, 1.0, 1.5, 2.0, 2.5], abs=1e-9
    )


def test_lengths_have_their_quantiles() -> None:
    draw = sample_length(LengthDistribution(p50=1020, p99=4142), rng(), no_trace)
    made = sorted(draw() for _ in range(20_000))
    assert made[10_000] == pytest.approx(1020, rel=0.03) and made[19_800] == pytest.approx(4142, rel=0.06)
    cut = sample_length(LengthDistribution(p50=1020, p99=4142, max=2000), rng(), no_trace)
    assert max(cut() for _ in range(5000)) == 2000
    least = sample_length(LengthDistribution(p50=1, p99=1), rng(), no_trace)
    assert least() == 1
    assert sample_length(7, rng(), no_trace)() == 7


def test_lengths_are_drawn_with_their_frequency_in_the_trace() -> None:
    read: list[str] = []

    def of_trace(path: str) -> Iterable[int]:
        read.append(path)
        return [100] * 90_000 + [900] * 10_000  # more than are kept

    draw = sample_length(LengthDistribution(trace="a.csv", max=800), rng(), of_trace)
    made = Counter(draw() for _ in range(5000))
    assert set(made) == {100, 800} and made[800] / 5000 == pytest.approx(0.1, abs=0.02)
    assert read == ["a.csv"]


def test_adapters_follow_zipf() -> None:
    choose = sample_adapter(AdapterPopularity(count=50, exponent=1.0, share=0.8), rng())
    counts = Counter(choose() for _ in range(20_000))
    assert counts[""] / 20_000 == pytest.approx(0.2, abs=0.02)
    assert counts["adapter-1"] / counts["adapter-2"] == pytest.approx(2.0, rel=0.1)
    assert len(counts) == 51
    named = sample_adapter(AdapterPopularity(names=("sql", "pirate"), exponent=0.0), rng())
    assert set(Counter(named() for _ in range(100))) == {"sql", "pirate"}


def conversations(spec: Conversations, user_tokens: int = 300, answer_tokens: int = 100) -> list[Arrival]:
    letters = iter("abc" * 1000)
    made = ConversationState(spec, rng(), lambda: user_tokens, lambda: answer_tokens, lambda: next(letters))
    return list(made.turns(iter(float(i) for i in range(500))))


CHAT = Conversations(turns=4.0, think_s=20.0, systems=3, system_tokens=1200, max_tokens=100_000)


def test_each_turn_contains_the_whole_history() -> None:
    made = conversations(CHAT)
    assert all(one.at <= other.at for one, other in pairwise(made))
    assert len(made) / 500 == pytest.approx(4.0, rel=0.15)
    by_session: dict[int, list[Arrival]] = {}
    for each in made:
        by_session.setdefault(each.session, []).append(each)
    assert set(by_session) == set(range(1, 501))
    gaps = []
    for turns in by_session.values():
        assert [each.input_tokens for each in turns] == [1500 + 400 * i for i in range(len(turns))]
        assert len({each.adapter for each in turns}) == 1
        for before, after in pairwise(turns):
            assert after.blocks[: len(before.blocks)] == before.blocks
            gaps.append(after.at - before.at)
        assert all(len(each.blocks) == each.input_tokens // BLOCK_TOKENS for each in turns)
    assert mean(gaps) == pytest.approx(20.0, rel=0.1)


def test_conversations_share_only_whole_blocks_of_the_system_prompt() -> None:
    made = conversations(CHAT)
    shared = 1200 // BLOCK_TOKENS
    assert len({each.blocks[:shared] for each in made}) == 3
    owners: dict[int, set[int]] = {}
    for each in made:
        for block in each.blocks[shared:]:
            owners.setdefault(block, set()).add(each.session)
    assert all(len(sessions) == 1 for sessions in owners.values())
    assert not {block for each in made for block in each.blocks[:shared]} & owners.keys()


def test_a_conversation_ends_before_the_maximum_length() -> None:
    made = conversations(msgspec.structs.replace(CHAT, max_tokens=2100, turns=50.0))
    counts = Counter(each.input_tokens for each in made)
    assert set(counts) == {1500, 1900} and counts[1500] == 500
    cut = conversations(msgspec.structs.replace(CHAT, max_tokens=1300))
    assert {(each.input_tokens, each.output_tokens) for each in cut} == {(1201, 99)}


SPEC = GeneratedWorkload(
    arrivals=RateShape(rate=5.0, cv=2.0),
    input_tokens=LengthDistribution(p50=100, p99=1000),
    output_tokens=LengthDistribution(p50=50, p99=200),
    adapters=AdapterPopularity(count=5),
)


@pytest.mark.parametrize("conversations", [None, CHAT])
def test_the_same_seed_gives_the_same_workload(conversations: Conversations | None) -> None:
    def made(
        seed: str, change: Callable[[GeneratedWorkload], GeneratedWorkload] = lambda spec: spec
    ) -> list[Arrival]:
        spec = change(msgspec.structs.replace(SPEC, conversations=conversations))
        return list(generate(spec, seed, 40.0, lambda path: []))

    assert made("1") == made("1") != made("2")
    longer = made("1", lambda spec: msgspec.structs.replace(spec, input_tokens=9))
    assert [each.at for each in longer] == [each.at for each in made("1")]
    assert {each.session for each in made("1")} == {0} or conversations is not None
