"""The twin's prefix cache: chains are found from their start, and who runs takes the room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sim.arrival import BLOCK_TOKENS
from sim.twin.prefix_cache import PrefixCache

chains = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=6), max_size=12)


def used(cache: PrefixCache, *blocks: int, tokens: int = 0) -> None:
    """A prompt of these blocks has run, alone: of so many tokens, or of whole blocks."""
    tokens = tokens or len(blocks) * BLOCK_TOKENS
    cache.hold(blocks)
    cache.make_room(tokens)
    cache.let_go(blocks, tokens)
    cache.make_room(0)


def test_what_was_used_is_found_up_to_the_first_block_that_differs() -> None:
    cache = PrefixCache(10 * BLOCK_TOKENS)
    used(cache, 1, 2, 3)
    assert cache.lookup((1, 2, 9), 2000) == 2 * BLOCK_TOKENS
    assert cache.lookup((9, 2, 3), 2000) == 0
    assert cache.lookup((), 2000) == 0


def test_the_last_token_is_always_computed_with_the_engines_block_of_it() -> None:
    cache = PrefixCache(10 * BLOCK_TOKENS)
    used(cache, 1, 2)
    assert cache.lookup((1, 2), 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS - 16
    assert cache.lookup((1, 2), BLOCK_TOKENS + 100) == BLOCK_TOKENS + 96
    assert cache.lookup((1, 2), BLOCK_TOKENS + 97) == BLOCK_TOKENS + 96


def test_the_oldest_chain_goes_from_its_end() -> None:
    cache = PrefixCache(5 * BLOCK_TOKENS)
    used(cache, 1, 2, 3)
    used(cache, 4, 5, 6)
    assert cache.lookup((1, 2, 3), 9999) == 2 * BLOCK_TOKENS
    assert cache.lookup((4, 5, 6), 9999) == 3 * BLOCK_TOKENS


def test_a_use_makes_a_chain_young_again() -> None:
    cache = PrefixCache(4 * BLOCK_TOKENS)
    for chain in ((1, 2), (3, 4), (1, 2), (5, 6)):
        used(cache, *chain)
    assert cache.lookup((1, 2), 9999) == 2 * BLOCK_TOKENS
    assert cache.lookup((3, 4), 9999) == 0


def test_who_runs_takes_the_room_and_keeps_what_it_holds() -> None:
    cache = PrefixCache(6 * BLOCK_TOKENS)
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


def test_what_several_hold_stays_until_the_last_lets_go_of_it() -> None:
    cache = PrefixCache(2 * BLOCK_TOKENS)
    cache.hold((1, 2))
    cache.hold((1,))
    cache.let_go((1, 2), 2 * BLOCK_TOKENS)
    cache.make_room(2 * BLOCK_TOKENS)
    assert cache.lookup((1, 2), 9999) == BLOCK_TOKENS
    cache.let_go((1,), BLOCK_TOKENS)
    cache.make_room(2 * BLOCK_TOKENS)
    assert cache.lookup((1,), 9999) == 0


def test_what_was_not_computed_does_not_stay() -> None:
    cache = PrefixCache(9 * BLOCK_TOKENS)
    used(cache, 1, 2, 3, tokens=BLOCK_TOKENS)
    assert cache.lookup((1, 2, 3), 9999) == BLOCK_TOKENS


@given(chains, st.integers(0, 8))
def test_it_never_has_more_than_there_is_room_for_and_keeps_the_last_that_fits(
    asked: list[list[int]], capacity: int
) -> None:
    cache = PrefixCache(capacity * BLOCK_TOKENS)
    for chain in asked:
        used(cache, *chain)
        assert cache.spare(0) >= 0
        assert cache.lookup(chain, 99_999) == min(len(chain), capacity) * BLOCK_TOKENS
