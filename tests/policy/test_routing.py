"""The least loaded replica relative to its bound, ties by the draw."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policy.routing import least_loaded

LOADS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 16)), max_size=8)
DRAW = st.floats(0.0, 1.0, exclude_max=True)


def test_load_counts_relative_to_the_bound() -> None:
    assert least_loaded([(2, 4), (6, 16)], 0.0) == 1


def test_the_draw_chooses_between_equals() -> None:
    loads = [(1, 4), (0, 4), (0, 4)]
    assert least_loaded(loads, 0.0) == 1
    assert least_loaded(loads, 0.99) == 2


def test_all_at_their_bound_is_no_one() -> None:
    assert least_loaded([(4, 4), (5, 4)], 0.5) is None
    assert least_loaded([], 0.5) is None


@given(LOADS, DRAW)
def test_never_over_a_bound_and_never_more_loaded_than_another(
    loads: list[tuple[int, int]], draw: float
) -> None:
    chosen = least_loaded(loads, draw)
    free = [(i, n / (b or 256)) for i, (n, b) in enumerate(loads) if not b or n < b]
    if not free:
        assert chosen is None
    else:
        assert dict(free)[chosen if chosen is not None else -1] == min(score for _, score in free)
