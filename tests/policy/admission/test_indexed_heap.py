"""The ordered set against a plain sort."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policy.admission.indexed_heap import IndexedHeap


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(-5, 5)), st.integers(0, 2))))
def test_order_and_least_equal_a_sort_of_the_members(steps: list[tuple[int, int | None, int]]) -> None:
    ranking: IndexedHeap[int] = IndexedHeap()
    plain: dict[int, tuple[int, int, int]] = {}
    for number, (member, key, then) in enumerate(steps):
        if key is None:
            assert ranking.drop(member) is (plain.pop(member, None) is not None)
        else:
            ranking.put(member, key, then)
            plain[member] = (key, then, number)
        expected = sorted(plain, key=lambda member: plain[member])
        assert [member for member, _ in ranking] == expected
        assert ranking.least() == ((expected[0], plain[expected[0]][0]) if expected else None)
        assert len(ranking) == len(plain)


def test_outdated_entries_are_removed() -> None:
    ranking: IndexedHeap[str] = IndexedHeap()
    for key in range(10_000):
        ranking.put("a", key)
    assert len(ranking._heap) < 100
    assert ranking.least() == ("a", 9999)


def test_what_left_a_queue_is_not_walked_over_again() -> None:
    ranking: IndexedHeap[int] = IndexedHeap()
    for member in range(1000):
        ranking.put(member, member)
    for member in range(0, 600, 2):
        ranking.drop(member)
    for member in range(1, 400, 2):
        ranking.drop(member)
    assert next(iter(ranking)) == (401, 401)
    assert len(ranking._heap) <= 600, "those before it are removed"
    for member in range(401, 990):
        ranking.drop(member)
    assert len(ranking._heap) <= 64 + 2 * len(ranking)
