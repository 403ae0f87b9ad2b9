"""The workload: sizes, shared prefixes and skew; and the answers of the upstream."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from loadtests.bench.parts.routing import least_pairs, round_figures
from loadtests.bench.replica import MockReplica, MockReplicaSettings, PromptMarker, read_mark
from loadtests.bench.workload import AdapterChats, PrefixedChats, SizedChats, draws, even


def seeded() -> Random:
    return Random(1)  # noqa: S311 - a workload, no secret


def body_of(request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    return body


@pytest.mark.parametrize("size", [110, 32 * 1024])
def test_sized_bodies_have_their_size_and_differ(size: int) -> None:
    sized = SizedChats(size, 3)
    bodies = [body_of(sized(i)) for i in range(4)]
    assert all(abs(len(body) - size) <= 2 for body in bodies)
    assert len(set(bodies)) == 3
    assert bodies[0] == bodies[3]


def test_prefixed_prompts_share_exactly_their_prefix() -> None:
    prefixed = PrefixedChats([5, 5, 6], 4096, 256)
    contents = [json.loads(body_of(prefixed(i)))["messages"][0]["content"] for i in range(3)]
    assert contents[0][:4096] == contents[1][:4096]
    assert contents[0][4096:] != contents[1][4096:]
    assert contents[0][:8] != contents[2][:8]
    assert len(contents[0]) == 4096 + 256
    assert read_mark(body_of(prefixed(0))) == PromptMarker(5, 1024, 1088)


def test_adapter_prompts_name_their_adapter_and_share_no_prefix() -> None:
    adapted = AdapterChats(["adapter-000", "adapter-001"], 128)
    document = json.loads(body_of(adapted(1)))
    assert document["model"] == "adapter-001"
    assert len(document["messages"][0]["content"]) == 128


def test_popularity_is_skewed_by_the_exponent() -> None:
    rng = seeded()
    top = Counter(draws(4000, 32, 1.0, rng)).most_common(1)[0][1] / 4000
    assert top == pytest.approx(0.246, abs=0.03)
    assert max(Counter(draws(4000, 32, 0.0, rng)).values()) < 4000 / 32 * 1.5


def test_arrivals_are_in_order_and_have_the_rate() -> None:
    due = even(2000, 100.0, seeded())
    assert due == sorted(due)
    assert due[-1] == pytest.approx(20.0, rel=0.1)


def test_the_home_share_counts_requests_on_the_main_replica_of_a_prefix() -> None:
    replicas = [MockReplica(MockReplicaSettings()) for _ in range(2)]
    for replica, prefix, times in ((0, 1, 3), (1, 1, 1), (1, 2, 4)):
        for _ in range(times):
            replicas[replica].arrive(PromptMarker(prefix, 10, 10), "", 0.0)
    one = round_figures([replica.counts() for replica in replicas], [1.0, 2.0, 3.0])
    assert one["home"] == pytest.approx(7 / 8)
    assert (one["pairs"], one["cold"], one["balance"]) == (3, 3, 1.25)


@pytest.mark.parametrize(
    ("drawn", "replicas", "room", "pairs"),
    [
        ([0, 1, 2, 3] * 10, 4, 4, 4),
        ([0] * 30 + [1, 2, 3] * 4, 4, 4, 6),  # three replicas for one prefix
        ([0] * 12 + [1] * 12 + [2] * 12, 2, 3, 4),  # one cut in two
        (list(range(9)), 2, 4, 0),  # they do not fit
    ],
)
def test_least_pairs_within_the_load_bound(drawn: list[int], replicas: int, room: int, pairs: int) -> None:
    assert least_pairs(drawn, replicas=replicas, bound=1.1, room=room) == pairs
