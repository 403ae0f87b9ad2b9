"""As dense as asked for, in order, and by chance alone another load."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise

import pytest

from sim.arrival import Arrival
from sim.workload.transforms import resample


def trace(count: int = 2000, each_s: float = 0.5) -> list[Arrival]:
    return [Arrival(i * each_s, 100 + i, 10, session=i + 1) for i in range(count)]


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
def test_there_are_so_many_times_as_many_at_any_time(factor: float) -> None:
    found = list(resample(trace(), factor, 0))
    for begins in (100.0, 500.0, 800.0):
        inside = [one for one in found if begins <= one.at < begins + 150.0]
        assert len(inside) == pytest.approx(300 * factor, rel=0.2)
    assert found[0].at >= 0.0
    assert found[-1].at < 1005.0


def test_they_come_in_order_and_near_where_they_came() -> None:
    found = list(resample(trace(), 2.5, 3))
    assert all(before.at <= after.at for before, after in pairwise(found))
    # The lengths say which one it was: itself, or for a copy one of the last ten seconds.
    assert all(-5.0 <= one.at - (one.input_tokens - 100) * 0.5 <= 15.0 for one in found)
    assert all(-5.0 <= one.at - (one.input_tokens - 100) * 0.5 <= 5.0 for one in found if one.session)


def test_once_each_are_the_same_requests_at_other_instants() -> None:
    """Factor 1 with another seed: the same lengths, another chance."""
    one, other = list(resample(trace(), 1.0, 1)), list(resample(trace(), 1.0, 2))
    assert sorted(each.input_tokens for each in one) == sorted(each.input_tokens for each in other)
    assert [each.at for each in one] != [each.at for each in other]
    assert one == list(resample(trace(), 1.0, 1))


def test_copies_belong_to_no_conversation() -> None:
    found = list(resample(trace(100), 3.0, 0))
    assert sum(each.session > 0 for each in found) == 100
    assert len({each.session for each in found if each.session}) == 100


def test_an_endless_trace_is_read_as_it_is_asked_for() -> None:
    def endless() -> Iterator[Arrival]:
        i = 0
        while True:
            yield Arrival(float(i), 1, 1)
            i += 1

    assert len(list(islice(resample(endless(), 2.0, 0), 100))) == 100


@pytest.mark.parametrize(("factor", "window_s"), [(0.0, 10.0), (-1.0, 10.0), (1.0, 0.0)])
def test_what_makes_no_load_is_refused(factor: float, window_s: float) -> None:
    with pytest.raises(ValueError, match=r"expected both above 0"):
        resample([], factor, 0, window_s)
