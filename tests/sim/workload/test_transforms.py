"""Properties of transformed workloads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.wire.capture import BLOCK_TOKENS
from sim.arrivals import Arrival
from sim.workload.transforms import mix, resample, scale_rate, slice_trace

TRACE = [Arrival(float(i), 100 + i, 10 + i) for i in range(10)]


def endless() -> Iterator[Arrival]:
    return (Arrival(float(i), 1, 1) for i in count())


def test_a_slice_begins_at_zero_and_excludes_its_end() -> None:
    assert list(slice_trace(TRACE, 2.5, 5.0)) == [Arrival(0.5, 103, 13), Arrival(1.5, 104, 14)]
    assert list(slice_trace(TRACE, 8.0)) == [Arrival(0.0, 108, 18), Arrival(1.0, 109, 19)]


def test_a_trace_is_read_lazily() -> None:
    assert len(list(slice_trace(endless(), 5.0, 8.0))) == 3
    assert next(scale_rate(endless(), rate=2.0)).at == 0.0
    assert len(list(islice(resample(endless(), 2.0, 0), 100))) == 100
    assert [each.at for each in islice(mix([endless(), endless()]), 4)] == [0.0, 0.0, 1.0, 1.0]


def test_the_rate_and_the_lengths_are_scaled() -> None:
    made = list(scale_rate(TRACE, rate=4.0, input_scale=0.5, output_scale=2.0))
    assert made[9] == Arrival(2.25, round(109 * 0.5), 38)
    (least,) = scale_rate([Arrival(0.0, 3, 3)], input_scale=0.01, output_scale=0.01)
    assert (least.input_tokens, least.output_tokens) == (1, 1)


@given(shared=st.integers(0, 40), own=st.integers(0, 40), scale=st.floats(0.05, 8.0))
def test_scaled_prompts_share_the_scaled_prefix(shared: int, own: int, scale: float) -> None:
    prompts = [
        Arrival(
            0.0,
            (shared + own) * BLOCK_TOKENS + 1,
            1,
            blocks=(*range(shared), *range(1000 * n, 1000 * n + own)),
        )
        for n in (1, 2)
    ]
    one, other = scale_rate(prompts, input_scale=scale)
    assert len(one.blocks) * BLOCK_TOKENS == pytest.approx(one.input_tokens, abs=1.5 * BLOCK_TOKENS)
    assert len(one.blocks) <= -(-one.input_tokens // BLOCK_TOKENS)
    same = [a == b for a, b in zip(one.blocks, other.blocks, strict=True)]
    assert same == sorted(same, reverse=True)  # a prefix
    assert sum(same) == pytest.approx(min(shared * scale, len(same)), abs=1.0)
    assert len(set(one.blocks)) == len(one.blocks)


@given(st.lists(st.lists(st.floats(0.0, 100.0)), max_size=4))
def test_a_mix_is_sorted_by_time(instants: list[list[float]]) -> None:
    made = list(mix([Arrival(at, 1, 1) for at in sorted(each)] for each in instants))
    assert sorted(each.at for each in made) == sorted(at for each in instants for at in each)
    assert all(one.at <= other.at for one, other in pairwise(made))


def test_a_mix_shares_no_conversation_and_no_prefix() -> None:
    trace = [Arrival(0.0, 600, 1, session=1, blocks=(1, 2)), Arrival(1.0, 600, 1, blocks=((1 << 63) - 1,))]
    a, b, alone, other = mix([trace, trace])
    assert a.session != b.session and alone.session == other.session == 0
    assert not set(a.blocks) & set(b.blocks) and alone.blocks != other.blocks
    assert all(0 <= block < 1 << 63 for each in (a, b, alone, other) for block in each.blocks)


def trace(count: int = 2000, each_s: float = 0.5) -> list[Arrival]:
    return [Arrival(i * each_s, 100 + i, 10, session=i + 1) for i in range(count)]


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
def test_resampling_scales_the_rate_throughout_the_trace(factor: float) -> None:
    found = list(resample(trace(), factor, 0))
    for begins in (100.0, 500.0, 800.0):
        inside = [one for one in found if begins <= one.at < begins + 150.0]
        assert len(inside) == pytest.approx(300 * factor, rel=0.2)
    assert found[0].at >= 0.0
    assert found[-1].at < 1005.0


def test_resampled_requests_are_sorted_and_near_their_instants() -> None:
    found = list(resample(trace(), 2.5, 3))
    assert all(before.at <= after.at for before, after in pairwise(found))
    # The length identifies the original: the request itself, or for a copy one of the last ten seconds.
    assert all(-5.0 <= one.at - (one.input_tokens - 100) * 0.5 <= 15.0 for one in found)
    assert all(-5.0 <= one.at - (one.input_tokens - 100) * 0.5 <= 5.0 for one in found if one.session)


def test_resampling_by_one_keeps_the_requests_and_moves_their_instants() -> None:
    one, other = list(resample(trace(), 1.0, 1)), list(resample(trace(), 1.0, 2))
    assert sorted(each.input_tokens for each in one) == sorted(each.input_tokens for each in other)
    assert [each.at for each in one] != [each.at for each in other]
    assert one == list(resample(trace(), 1.0, 1))


def test_copies_belong_to_no_conversation() -> None:
    found = list(resample(trace(100), 3.0, 0))
    assert sum(each.session > 0 for each in found) == 100
    assert len({each.session for each in found if each.session}) == 100
