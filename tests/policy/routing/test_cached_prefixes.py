"""The prefix index: which prefixes are assumed cached, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.routing.cached_prefixes import DOUBT, PrefixIndex
from policy.wire.load_stream import CachedPrefix

CHAIN = (10, 20, 30, 40, 50, 60, 70)


def test_the_longest_common_prefix_is_found() -> None:
    held = PrefixIndex()
    held.touch(CHAIN, 700, at=0.0)
    for depth in range(len(CHAIN) + 1):
        assert held.depth((*CHAIN[:depth], 1, 3, 5), at=1.0) == depth
    assert held.depth(CHAIN[:3], at=1.0) == 3
    assert held.depth((), at=1.0) == 0


def test_unused_prefixes_expire() -> None:
    held = PrefixIndex(age_s=100.0)
    held.touch(CHAIN, 700, at=0.0)
    assert held.depth(CHAIN, at=45.0) == len(CHAIN)
    assert held.depth(CHAIN, at=300.0) == 0
    assert len(held) == 0


def test_used_prefixes_stay() -> None:
    held = PrefixIndex(age_s=100.0)
    for at in range(0, 1000, 40):
        held.touch(CHAIN, 0, at=float(at))
        assert held.depth(CHAIN, at=float(at + 39)) == len(CHAIN)


def test_prefixes_beyond_the_kv_capacity_count_as_evicted_but_are_remembered() -> None:
    held = PrefixIndex()
    held.capacity = 1000
    held.touch(CHAIN, 700, at=0.0)
    held.touch((2, 4), 900, at=1.0)
    assert held.depth(CHAIN, at=1.0) == len(CHAIN)
    held.touch((6, 8), 200, at=2.0)
    assert held.depth(CHAIN, at=2.0) == 0
    assert CHAIN[0] in held
    assert held.age(CHAIN[0]) == 1100


def test_repeated_late_first_tokens_lower_the_capacity() -> None:
    held = PrefixIndex()
    held.touch((2,), 5000, at=0.0)
    held.was_gone(3000)
    assert held.depth((2,), at=0.0) == 1, "a single late first token changes nothing"
    for _ in range(int(DOUBT) + 20):
        held.was_gone(3000)
    assert 0.9 * 3000 <= held.capacity < 3000
    assert held.depth((2,), at=0.0) == 1, "it was used most recently"
    held.survived(4000)
    assert held.capacity >= 4000


@pytest.mark.slow
@given(
    chains=st.lists(st.lists(st.integers(0, 200).map(lambda x: 2 * x), max_size=12), max_size=60),
    capacity=st.integers(2, 40),
)
def test_the_index_never_exceeds_its_bound(chains: list[list[int]], capacity: int) -> None:
    held = PrefixIndex(capacity=capacity)
    for at, chain in enumerate(chains):
        held.touch(chain, 10, at=float(at))
        assert len(held) <= capacity


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=20))
def test_the_depth_is_that_of_a_sent_prompt(sequences: list[list[int]]) -> None:
    """Chained hashes stand for all before them: the depth is the longest common prefix with a sent prompt."""
    held, sent = PrefixIndex(capacity=1000), set()
    for at, sequence in enumerate(sequences):
        chain = [hash(tuple(sequence[: i + 1])) for i in range(len(sequence))]
        depth = held.depth(chain, at=float(at))
        assert depth == max((i + 1 for i, value in enumerate(chain) if value in sent), default=0)
        held.touch(chain, 1, at=float(at))
        sent.update(chain)


def cached(*hashes: int, tokens: int = 100) -> list[CachedPrefix]:
    return [CachedPrefix(value, tokens) for value in hashes]


def test_what_the_engine_reports_replaces_the_estimate() -> None:
    held = PrefixIndex(age_s=100.0)
    held.capacity = 500.0
    held.touch(CHAIN, 700, at=0.0)
    held.reset()
    assert held.depth(CHAIN, at=1.0) == 0, "nothing is held but what is reported"
    assert CHAIN[0] in held, "its last home is known"
    held.report(cached(*CHAIN[:3]), cached(*CHAIN[3:]), at=2.0)
    held.touch((2, 4), 10_000, at=3.0)
    assert held.depth(CHAIN, at=4.0) == 3, "neither its size nor its age counts any more"
    assert held.depth(CHAIN, at=1e6) == 3


def test_a_prefix_is_held_from_its_sending_until_the_engine_reports_it_gone() -> None:
    held = PrefixIndex()
    held.reset()
    held.touch(CHAIN, 700, at=0.0)
    assert held.depth(CHAIN, at=0.0) == len(CHAIN)
    held.report([], cached(*CHAIN[2:], tokens=64), at=1.0)
    assert held.depth(CHAIN, at=1.0) == 2
    assert held.age(CHAIN[-1]) == 0
    held.touch(CHAIN, 10, at=2.0)
    assert held.depth(CHAIN, at=2.0) == len(CHAIN)
    assert held.tokens[CHAIN[-1]] == 64, "what it is worth once it is computed again is known"


def test_tokens_in_host_memory_follow_the_report() -> None:
    held = PrefixIndex()
    held.reset()
    held.report([CachedPrefix(2, 64, 32)], [], at=0.0)
    assert (held.tokens, held.host) == ({2: 96}, {2: 32})
    held.report([CachedPrefix(2, 96)], [], at=0.0)
    assert (held.tokens, held.host) == ({2: 96}, {})
    held.report([CachedPrefix(2, 0, 96)], [], at=0.0)
    held.report([], [CachedPrefix(2, 96)], at=0.0)
    assert held.host == {}


@given(
    news=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=200),
    capacity=st.integers(2, 40),
)
def test_reports_never_exceed_the_bound(news: list[tuple[bool, int]], capacity: int) -> None:
    held = PrefixIndex(capacity=capacity)
    held.reset()
    for at, (there, value) in enumerate(news):
        each = cached(2 * value)
        held.report(each if there else [], [] if there else each, at=float(at))
        assert len(held) <= capacity
        assert (held.depth((2 * value,), at=float(at)) == 1) is there
        assert len(held.tokens) <= 4 * capacity
