"""The log of an engine's KV events: what each event does to the index, and what is not believed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.hashing import block_keys
from policy.routing.engine_prefix_index import KvBlockIndex, NamedPrompt
from policy.routing.kv_event_log import KvEventLog
from tests.store.kv_events.publisher import batch, removed, stored

BLOCK = 4
TOKENS = list(range(100, 124))


def log_of(*batches: bytes, **settings: Any) -> KvEventLog:
    log = KvEventLog(KvBlockIndex(0), **settings)
    for number, payload in enumerate(batches):
        log.take(number, payload)
    return log


def finds(log: KvEventLog, extras: Any = ()) -> tuple[int, int]:
    return log.index.tokens_of(block_keys(TOKENS, BLOCK, extras=extras))


FIRST = batch(stored([b"1", b"2"], TOKENS[:8], BLOCK), stored([b"3"], TOKENS[8:12], BLOCK, b"2"))


def test_the_size_of_blocks_is_that_of_the_first() -> None:
    log = log_of(FIRST, batch(stored([9], TOKENS[12:20], 8, b"3")))
    assert log.index.block_tokens == BLOCK
    assert finds(log) == (12, 0)


def test_events_of_older_versions_are_arrays() -> None:
    before = ["BlockStored", [1, 2], None, TOKENS[:8], BLOCK, None]
    assert finds(log_of(batch(before))) == (8, 0)
    log = log_of(batch([*before, "GPU"]), batch(["BlockRemoved", [2]]))
    assert finds(log) == (4, 0)
    log.take(2, batch(["AllBlocksCleared"]))
    assert finds(log) == (0, 0)


def test_adapters_and_salts_are_a_part_of_a_block() -> None:
    salted = [("sql", "salt"), ("sql",)]
    log = log_of(batch(stored([1, 2], TOKENS[:8], BLOCK, extra_keys=salted)))
    assert finds(log, [*salted, *[("sql",)] * 4]) == (8, 0)
    assert finds(log) == (0, 0)


@pytest.mark.parametrize(
    "event",
    [
        stored([5], TOKENS[:4], BLOCK, group_idx=1),
        stored([5], TOKENS[:4], BLOCK, kv_cache_spec_kind="sliding_window"),
    ],
)
def test_events_that_do_not_tell_what_a_prompt_finds_say_so(event: Any) -> None:
    assert log_of(FIRST).unsupported == ""
    assert log_of(batch(event)).unsupported


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"events": []}),
        batch({"type": "Unknown"}),
        batch(stored([4], ["a"], BLOCK, b"3")),  # type: ignore[list-item]
        batch(stored([4, 5], TOKENS[12:16], BLOCK, b"3")),
        batch(stored([4], TOKENS[12:16], BLOCK, b"3", extra_keys=[[{"a": 1}]])),
        batch(stored([4, 5], TOKENS[12:20], BLOCK, b"3", extra_keys=[["a"]])),
        b"\x91" * 100_000,
    ],
)
def test_a_malformed_batch_counts_as_lost(payload: bytes) -> None:
    log = log_of(FIRST)
    log.take(1, payload)
    assert (log.malformed, log.next, finds(log)) == (1, 2, (0, 0))
    assert log.index.lossy
    log.take(2, FIRST)
    assert finds(log) == (12, 0)


def test_blocks_of_the_wrong_size_and_beyond_the_bound_do_not_count_as_held() -> None:
    zero = log_of(batch(stored([1], TOKENS[:4], 0)))
    assert (finds(zero), zero.index.block_tokens) == ((0, 0), 0)
    assert finds(log_of(FIRST, max_blocks=2)) == (8, 0)


def test_blocks_of_a_cleared_cache_leave_the_bound() -> None:
    log = log_of(max_blocks=12)
    for number in range(0, 20, 2):
        tokens = [1000 * number + token for token in range(40)]
        log.take(number, batch(stored(list(range(10 * number, 10 * number + 10)), tokens, BLOCK)))
        assert log.index.tokens_of(block_keys(tokens, BLOCK, extras=())) == (40, 0)
        log.take(number + 1, batch(["AllBlocksCleared"]))


def test_a_gap_is_lost_and_old_batches_are_known() -> None:
    log = log_of(FIRST)
    assert log.is_last(0, FIRST)
    log.take(0, batch(removed(b"1")))
    assert (finds(log), log.lost) == ((12, 0), 0)
    log.take(3, batch(stored([9], TOKENS[:4], BLOCK)))
    assert (finds(log), log.lost, log.index.lossy) == ((4, 0), 2, True)
    log.restart()
    assert (finds(log), log.next, log.index.lossy) == ((0, 0), 0, False)
    assert log.index.news(0).reset


def test_a_prompt_that_is_named_late_shares_nothing_with_itself() -> None:
    """Its own blocks are stored by then, beside those of one that begins alike."""
    index = KvBlockIndex(BLOCK)
    other, mine = [*TOKENS[:8], *[1] * 8], [*TOKENS[:8], *[2] * 8]
    sent_at = index.stores
    index.stored(block_keys(other, BLOCK))
    index.name(NamedPrompt((2, 4), (8, 16), 16), block_keys(other, BLOCK), 17, sent_at)
    sent_at = index.stores
    index.stored(block_keys(mine, BLOCK)[2:], block_keys(mine, BLOCK)[1])
    index.name(NamedPrompt((2, 6), (8, 16), 16), block_keys(mine, BLOCK), 17, sent_at)
    held = {each.hash: each.tokens for each in index.news(-1).held}
    assert held == {2: 8, 4: 16, 6: 16}
