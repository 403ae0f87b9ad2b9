"""The twin's prefix cache: chains are found from their start, the last token never, and the oldest goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sim.prefix import PrefixCache
from sim.trace import BLOCK_TOKENS

chains = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=6), max_size=12)


def test_what_was_inserted_is_found_up_to_the_first_block_that_differs() -> None:
    cache = PrefixCache(10 * BLOCK_TOKENS)
    cache.insert((1, 2, 3))
    assert cache.lookup((1, 2, 9), 2000) == 2 * BLOCK_TOKENS
    assert cache.lookup((9, 2, 3), 2000) == 0
    assert cache.lookup((), 2000) == 0


def test_the_last_token_is_always_computed() -> None:
    cache = PrefixCache(10 * BLOCK_TOKENS)
    cache.insert((1, 2))
    assert cache.lookup((1, 2), 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS - 1
    assert cache.lookup((1, 2), BLOCK_TOKENS + 100) == BLOCK_TOKENS + 99


def test_the_oldest_chain_goes_from_its_end() -> None:
    cache = PrefixCache(5 * BLOCK_TOKENS)
    cache.insert((1, 2, 3))
    cache.insert((4, 5, 6))
    assert cache.lookup((1, 2, 3), 9999) == 2 * BLOCK_TOKENS
    assert cache.lookup((4, 5, 6), 9999) == 3 * BLOCK_TOKENS


def test_a_use_makes_a_chain_young_again() -> None:
    cache = PrefixCache(4 * BLOCK_TOKENS)
    cache.insert((1, 2))
    cache.insert((3, 4))
    cache.insert((1, 2))
    cache.insert((5, 6))
    assert cache.lookup((1, 2), 9999) == 2 * BLOCK_TOKENS
    assert cache.lookup((3, 4), 9999) == 0


def test_less_than_a_block_holds_nothing() -> None:
    cache = PrefixCache(BLOCK_TOKENS - 1)
    cache.insert((1,))
    assert (len(cache), cache.lookup((1,), 600)) == (0, 0)


@given(chains, st.integers(0, 8))
def test_it_never_holds_more_than_it_may_and_keeps_the_last_that_fits(
    used: list[list[int]], capacity: int
) -> None:
    cache = PrefixCache(capacity * BLOCK_TOKENS)
    for chain in used:
        cache.insert(chain)
        assert len(cache) <= capacity
        assert cache.lookup(chain, 99_999) == min(len(chain), capacity) * BLOCK_TOKENS
