"""The imagined replica: what is cached, who waits, what an adapter costs."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from loadtests.bench.replica import MARK_CHARS, Mark, Replica, Setting, marked, read_mark

WARM = Setting(base_s=1.0, token_s=0.1, lanes=1, cache_tokens=20)
FIRST = Mark(prefix=1, prefix_tokens=10, tokens=15)


def other(prefix: int) -> Mark:
    return Mark(prefix=prefix, prefix_tokens=10, tokens=15)


def test_a_mark_is_read_back_from_a_body() -> None:
    body = json.dumps({"messages": [{"content": "x" * 50 + marked(7, 4096, 4352) + "text"}]}).encode()
    assert read_mark(body) == Mark(7, 1024, 1088)
    assert len(marked(999_999, 10**6, 10**6)) == MARK_CHARS


def test_a_body_without_a_mark_has_none() -> None:
    assert read_mark(b'{"messages": [{"content": "[parts of a list]"}]}') is None


def test_a_cached_prefix_costs_only_what_follows_it() -> None:
    replica = Replica(WARM)
    assert replica.arrive(FIRST, "", at=0.0) == 0.0 + 1.0 + 1.5
    assert replica.arrive(FIRST, "", at=10.0) == 10.0 + 1.0 + 0.5
    assert replica.counts().cold == 1


def test_the_prefix_used_longest_ago_makes_room() -> None:
    replica = Replica(WARM)
    for prefix in (1, 2, 1, 3):
        replica.arrive(other(prefix), "", at=0.0)
    assert replica.counts().cold == 3
    replica.arrive(other(1), "", at=0.0)
    assert replica.counts().cold == 3
    replica.arrive(other(2), "", at=0.0)
    assert replica.counts().cold == 4


def test_prefills_wait_for_a_lane() -> None:
    replica = Replica(Setting(base_s=1.0, token_s=0.1, lanes=2))
    firsts = [replica.arrive(other(i), "", at=0.0) for i in range(4)]
    assert firsts == [2.5, 2.5, 5.0, 5.0]
    assert replica.arrive(other(0), "", at=20.0) == 20.0 + 1.0 + 0.5


def test_an_adapter_without_a_slot_is_loaded() -> None:
    replica = Replica(Setting(slots=2, load_s=3.0, token_s=0.1))
    bare = Mark(0, 0, 0)
    took = [replica.arrive(bare, name, at=100.0 * i) - 100.0 * i for i, name in enumerate("abacb")]
    assert took == [3.0, 3.0, 0.0, 3.0, 3.0]
    assert replica.counts().loads == 4


def test_a_slow_replica_keeps_its_cache() -> None:
    replica = Replica(WARM)
    replica.arrive(FIRST, "", at=0.0)
    replica.slow_down(10.0)
    assert replica.arrive(FIRST, "", at=100.0) == 100.0 + 15.0


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 2)), max_size=60), st.integers(1, 4))
def test_every_request_is_counted_once_and_none_is_answered_early(
    arrivals: list[tuple[int, float]], lanes: int
) -> None:
    setting = Setting(base_s=0.5, token_s=0.1, lanes=lanes, cache_tokens=30)
    replica = Replica(setting)
    now = 0.0
    for prefix, gap in arrivals:
        now += gap
        assert replica.arrive(other(prefix), "", now) >= now + 0.5 + 0.1 * 5
    counts = replica.counts()
    assert counts.requests == len(arrivals)
    assert len(counts.by_prefix) <= counts.cold <= counts.requests
