"""Parts are joined as they arrive, in memory that is theirs alone."""

from __future__ import annotations

import tracemalloc

import pytest

from gateway.http.byte_accumulator import LARGE_BYTES, ROOM_FROM, ByteAccumulator


@pytest.mark.parametrize("known", [True, False], ids=["known length", "unknown length"])
@pytest.mark.parametrize(
    "sizes",
    [[], [5], [1, 2, 3], [1] * 300, [LARGE_BYTES // 4] * 9, [LARGE_BYTES, 7], [3, LARGE_BYTES, LARGE_BYTES]],
    ids=["none", "one", "few", "many small", "large", "two", "large ones"],
)
def test_all_parts_in_order(sizes: list[int], known: bool) -> None:
    joined = ByteAccumulator()
    for again in range(2):
        parts = [bytes([(i + again) % 256]) * size for i, size in enumerate(sizes)]
        for part in parts:
            joined.add(part, sum(sizes) if known else 0)
        assert joined.size == sum(sizes)
        assert joined.take() == b"".join(parts)
        assert joined.size == 0


def test_what_did_not_arrive_is_not_in_it() -> None:
    joined = ByteAccumulator()
    for _ in range(3):
        joined.add(b"x" * LARGE_BYTES, 9 * LARGE_BYTES)
    assert joined.take() == b"x" * 3 * LARGE_BYTES


def test_a_long_body_is_in_memory_once() -> None:
    joined, part, size = ByteAccumulator(), b"x" * (LARGE_BYTES // 8), 16 * LARGE_BYTES
    tracemalloc.start()
    try:
        for _ in range(size // len(part)):
            joined.add(part, size)
        whole = joined.take()
        assert len(whole) == size
        assert tracemalloc.get_traced_memory()[1] < 1.1 * size
    finally:
        tracemalloc.stop()


def test_room_for_a_long_body_is_made_early() -> None:
    """A block of its own is the kernel's again when it is freed; a part of the heap may not be."""
    joined = ByteAccumulator()
    tracemalloc.start()
    try:
        for _ in range(2):
            joined.add(b"x" * (ROOM_FROM // 2), 16 * LARGE_BYTES)
        assert tracemalloc.get_traced_memory()[0] > 16 * LARGE_BYTES
    finally:
        tracemalloc.stop()


def test_who_announces_much_and_sends_little_holds_little() -> None:
    joined = [ByteAccumulator() for _ in range(100)]
    tracemalloc.start()
    try:
        for each in joined:
            each.add(b"x" * 900, 16 * LARGE_BYTES)
            each.add(b"x" * 900, 16 * LARGE_BYTES)
        assert tracemalloc.get_traced_memory()[0] < 100 * 4000
    finally:
        tracemalloc.stop()
