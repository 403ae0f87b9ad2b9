"""The prefix cache: blocks are found from the start of a prompt, and running requests take their memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policy.engine import prefix_cache
from policy.engine.performance_model import BLOCK
from policy.engine.prefix_cache import block_hashes

BLOCK_TOKENS = 512

chains = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=6), max_size=12)


def cache_of(kv_tokens: int) -> prefix_cache.PrefixCache:
    return prefix_cache.PrefixCache(kv_tokens, BLOCK_TOKENS)


def used(cache: prefix_cache.PrefixCache, *blocks: int, tokens: int = 0) -> None:
    """A prompt of these blocks has run, alone: of so many tokens, or of whole blocks."""
    tokens = tokens or len(blocks) * BLOCK_TOKENS
    cache.hold(blocks)
    cache.make_room(tokens)
    cache.release(blocks, tokens)
    cache.make_room(0)


def test_lookup_ends_at_the_first_different_block() -> None:
    cache = cache_of(10 * BLOCK_TOKENS)
    used(cache, 1, 2, 3)
    assert cache.lookup((1, 2, 9), 2000) == 2 * BLOCK_TOKENS
    assert cache.lookup((9, 2, 3), 2000) == 0
    assert cache.lookup((), 2000) == 0


def test_the_block_of_the_last_token_is_always_computed() -> None:
    cache = cache_of(10 * BLOCK_TOKENS)
    used(cache, 1, 2)
    assert cache.lookup((1, 2), 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS - 16
    assert cache.lookup((1, 2), BLOCK_TOKENS + 100) == BLOCK_TOKENS + 96
    assert cache.lookup((1, 2), BLOCK_TOKENS + 97) == BLOCK_TOKENS + 96


def test_the_oldest_chain_is_evicted_from_its_end() -> None:
    cache = cache_of(5 * BLOCK_TOKENS)
    used(cache, 1, 2, 3)
    used(cache, 4, 5, 6)
    assert cache.lookup((1, 2, 3), 9999) == 2 * BLOCK_TOKENS
    assert cache.lookup((4, 5, 6), 9999) == 3 * BLOCK_TOKENS


def test_eviction_is_least_recently_used_first() -> None:
    cache = cache_of(4 * BLOCK_TOKENS)
    for chain in ((1, 2), (3, 4), (1, 2), (5, 6)):
        used(cache, *chain)
    assert cache.lookup((1, 2), 9999) == 2 * BLOCK_TOKENS
    assert cache.lookup((3, 4), 9999) == 0


def test_running_requests_evict_free_blocks_only() -> None:
    cache = cache_of(6 * BLOCK_TOKENS)
    used(cache, 1, 2, 3)
    cache.hold((4, 5))
    assert cache.spare(2 * BLOCK_TOKENS) == BLOCK_TOKENS
    cache.make_room(3 * BLOCK_TOKENS)
    assert cache.lookup((1, 2, 3), 9999) == 3 * BLOCK_TOKENS
    cache.make_room(3 * BLOCK_TOKENS + 1)
    assert cache.lookup((1, 2, 3), 9999) == 2 * BLOCK_TOKENS
    cache.make_room(6 * BLOCK_TOKENS)
    assert cache.lookup((1, 2, 3), 9999) == 0
    assert cache.lookup((4, 5), 9999) == 2 * BLOCK_TOKENS


def test_a_shared_block_is_held_until_its_last_release() -> None:
    cache = cache_of(2 * BLOCK_TOKENS)
    cache.hold((1, 2))
    cache.hold((1,))
    cache.release((1, 2), 2 * BLOCK_TOKENS)
    cache.make_room(2 * BLOCK_TOKENS)
    assert cache.lookup((1, 2), 9999) == BLOCK_TOKENS
    cache.release((1,), BLOCK_TOKENS)
    cache.make_room(2 * BLOCK_TOKENS)
    assert cache.lookup((1,), 9999) == 0


def test_blocks_that_were_not_computed_are_not_cached() -> None:
    cache = cache_of(9 * BLOCK_TOKENS)
    used(cache, 1, 2, 3, tokens=BLOCK_TOKENS)
    assert cache.lookup((1, 2, 3), 9999) == BLOCK_TOKENS


@given(chains, st.integers(0, 8))
def test_the_cache_is_bounded_and_keeps_the_latest_chain(asked: list[list[int]], capacity: int) -> None:
    cache = cache_of(capacity * BLOCK_TOKENS)
    for chain in asked:
        used(cache, *chain)
        assert cache.spare(0) >= 0
        assert cache.lookup(chain, 99_999) == min(len(chain), capacity) * BLOCK_TOKENS


@given(chains, st.integers(0, 8), st.integers(0, 8))
def test_a_block_is_in_one_memory_and_both_keep_their_size(
    asked: list[list[int]], capacity: int, host_capacity: int
) -> None:
    sizes = capacity * BLOCK_TOKENS, host_capacity * BLOCK_TOKENS
    cache = prefix_cache.PrefixCache(sizes[0], BLOCK_TOKENS, host_tokens=sizes[1], reports=True)
    alone = cache_of(sizes[0])
    memories: tuple[set[object], set[object]] = set(), set()
    for chain in asked:
        assert cache.lookup(chain, 99_999) >= alone.lookup(chain, 99_999)
        used(alone, *chain)
        used(cache, *chain)
        for change in cache.take_changes():
            memory = memories[change.host]
            assert (change.block in memory) is not change.stored
            (memory.add if change.stored else memory.remove)(change.block)
        device, host = memories
        assert not device & host
        assert len(device) <= capacity and len(host) <= host_capacity
        assert all((block in cache) is (block in device | host) for block in range(13))
        found = cache.lookup(chain, 99_999)
        assert cache.in_host(chain, found) == BLOCK_TOKENS * len(host & {*chain[: found // BLOCK_TOKENS]})


def test_host_memory_evicts_the_oldest_and_a_prompt_takes_its_blocks_back() -> None:
    cache = prefix_cache.PrefixCache(2 * BLOCK_TOKENS, BLOCK_TOKENS, host_tokens=3 * BLOCK_TOKENS)
    for chain in ((1, 2), (3, 4), (5, 6)):
        used(cache, *chain)
    assert (cache.lookup((1, 2), 9999), cache.in_host((1, 2), 1000)) == (BLOCK_TOKENS, BLOCK_TOKENS)
    assert cache.in_host((3, 4), 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    assert cache.in_host((3, 4), BLOCK_TOKENS + 100) == BLOCK_TOKENS + 100
    used(cache, 3, 4)
    assert (cache.lookup((3, 4), 9999), cache.in_host((3, 4), 9999)) == (2 * BLOCK_TOKENS, 0)
    cache.clear()
    assert [block in cache for block in range(1, 7)] == [False] * 6


def test_block_hashes_include_all_blocks_before_and_the_salt() -> None:
    prompt = [b"%d" % i for i in range(2 * BLOCK + 8)]
    first, second = block_hashes(prompt, "a")
    assert block_hashes([*prompt[:BLOCK], *prompt[:BLOCK]], "a")[0] == first
    assert block_hashes([*prompt[:BLOCK], *prompt[:BLOCK]], "a")[1] != second
    assert not {first, second} & {*block_hashes(prompt, "b")}


def test_clear_evicts_the_blocks_that_no_request_holds() -> None:
    cache = cache_of(4 * BLOCK_TOKENS)
    used(cache, 1, 2)
    cache.hold((1,))
    cache.clear()
    assert cache.lookup((1, 2), 9999) == BLOCK_TOKENS and cache.spare(0) == 4 * BLOCK_TOKENS
