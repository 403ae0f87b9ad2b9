"""The index of KV blocks against a model of an engine's cache that is searched by brute force."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.hashing import block_keys
from policy.routing import engine_block_tree, engine_prefix_index
from policy.routing.engine_block_tree import KvBlock
from policy.routing.engine_prefix_index import KvBlockIndex, NamedPrompt, PrefixIndexUpdate

BLOCK = 4
# Characters of a prompt up to each of its hashes. A token is a character.
BOUNDARIES = tuple(range(6, 200, 6))


def hashes_of(prompt: str) -> tuple[int, ...]:
    return tuple(hash(prompt[:end]) & ~1 for end in BOUNDARIES if end <= len(prompt))


class Gateway:
    """What one gateway believes of the engine: the news that it has read."""

    def __init__(self, index: KvBlockIndex) -> None:
        self.index = index
        self.at = -1
        self.held: dict[int, tuple[int, int]] = {}

    def read(self) -> PrefixIndexUpdate:
        news = self.index.news(self.at)
        self.at = news.at
        if news.reset:
            self.held.clear()
        for gone in news.gone:
            self.held.pop(gone.hash, None)
        for each in news.held:
            self.held[each.hash] = (each.tokens, each.host_tokens)
        return news

    def depth(self, prompt: str) -> int:
        """How many of the hashes of ``prompt`` are held, from the start."""
        return sum(value in self.held for value in hashes_of(prompt))

    def believes(self, prompt: str) -> tuple[int, int]:
        hashes = hashes_of(prompt)
        deepest = next((value for value in reversed(hashes) if value in self.held), None)
        return (0, 0) if deepest is None else self.held[deepest]


class Engine:
    """A cache of blocks that evicts leaves, as vLLM's; ``deaf`` while its events are lost."""

    def __init__(self, index: KvBlockIndex) -> None:
        self.index = index
        self.device: Counter[int] = Counter()
        self.host: Counter[int] = Counter()
        self.parents: dict[int, int] = {}
        self.deaf = False

    def finds(self, prompt: str) -> tuple[int, int]:
        keys = block_keys(prompt, BLOCK)[: (len(prompt) - 1) // BLOCK]
        near = 0
        while near < len(keys) and self.device[keys[near]]:
            near += 1
        found = near
        while found < len(keys) and self.host[keys[found]]:
            found += 1
        return near * BLOCK, (found - near) * BLOCK

    def send(self, prompt: str, gateway: Gateway) -> None:
        """A request, named as a gateway does that believes this."""
        hashes = hashes_of(prompt)
        known = max(gateway.depth(prompt) - 1, 0)
        named = NamedPrompt(hashes[known:], BOUNDARIES[known : len(hashes)], len(prompt))
        keys = block_keys(prompt, BLOCK)
        doubtful = bool(hashes) and self.index.name(named, keys, len(prompt))
        near = self.finds(prompt)[0] // BLOCK
        if doubtful and not self.deaf:
            self.index.stored(keys[:near])
        self.parents |= dict(zip(keys, [0, *keys], strict=False))
        self.store(keys[near:], keys[near - 1] if near else 0)

    def store(self, keys: Sequence[int], parent: int, *, host: bool = False) -> None:
        (self.host if host else self.device).update(keys)
        if not self.deaf:
            self.index.stored(keys, parent, host=host)

    def remove(self, key: int, *, host: bool = False) -> None:
        (self.host if host else self.device)[key] -= 1
        if not self.deaf:
            self.index.removed(key, host=host)

    def leaf(self, rng: random.Random) -> int | None:
        """A block in device memory that none continues."""
        there = [key for key, copies in self.device.items() if copies]
        inner = {self.parents[key] for key in there}
        leaves = [key for key in there if key not in inner]
        return rng.choice(leaves) if leaves else None

    def offload(self, key: int) -> None:
        self.store([key], self.parents[key], host=True)


def texts(rng: random.Random, count: int, low: int, high: int) -> list[str]:
    return [
        f"{i:02d}" + "".join(rng.choice("abcdefgh") for _ in range(rng.randrange(low, high)))
        for i in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_believed_is_what_the_engine_finds(seed: int, host: bool) -> None:
    """Prompts of shared beginnings: once two of one were seen the news are exact, whatever is evicted."""
    rng = random.Random(seed)  # noqa: S311
    index = KvBlockIndex(BLOCK)
    engine, gateway, late = Engine(index), Gateway(index), Gateway(index)
    shared = texts(rng, 6, 10, 90)
    seen: Counter[str] = Counter()
    for number in range(400):
        beginning = rng.choice(shared)
        prompt = beginning + chr(0x4E00 + number) + "z" * rng.randrange(20)
        gateway.read()
        if seen[beginning] > 1 and len(beginning) >= BOUNDARIES[0]:
            assert gateway.believes(prompt) == engine.finds(prompt)
        engine.send(prompt, gateway)
        seen[beginning] += 1
        for _ in range(rng.randrange(14)):
            if (key := engine.leaf(rng)) is not None:
                if host and rng.random() < 0.7:
                    engine.offload(key)
                engine.remove(key)
        if host and engine.host and rng.random() < 0.3:
            engine.remove(rng.choice(list(engine.host.elements()) or [0]), host=True)
        if number % 50 == 0:
            late.at = -1
    gateway.read()
    assert late.read().reset
    assert late.held == gateway.held


@pytest.mark.parametrize("seed", range(8))
def test_after_a_gap_one_request_for_each_prefix_makes_the_belief_exact_again(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    index = KvBlockIndex(BLOCK)
    engine, gateway = Engine(index), Gateway(index)
    shared = texts(rng, 6, 20, 90)

    def ask(beginning: str, number: int) -> tuple[tuple[int, int], tuple[int, int]]:
        gateway.read()
        prompt = beginning + chr(0x4E00 + number) + "zzzz"
        found = gateway.believes(prompt), engine.finds(prompt)
        engine.send(prompt, gateway)
        for _ in range(6):
            if (key := engine.leaf(rng)) is not None:
                engine.remove(key)
        return found

    for number in range(60):
        ask(rng.choice(shared), number)
    engine.deaf = True
    for number in range(60, 80):
        ask(rng.choice(shared), number)
    engine.deaf = False
    index.lost()
    assert gateway.read().reset
    assert not gateway.held
    asked: set[str] = set()
    for number in range(100, 300):
        beginning = rng.choice(shared)
        believed, found = ask(beginning, number)
        assert believed <= found, "after a gap nothing is believed that is not confirmed"
        if beginning in asked:
            assert believed == found
        asked.add(beginning)


def test_a_prefix_that_was_seen_once_ends_where_its_part_of_the_bytes_does() -> None:
    index = KvBlockIndex(BLOCK)
    engine, gateway = Engine(index), Gateway(index)
    prompt = "".join(chr(97 + i % 26) for i in range(60))
    engine.send(prompt, gateway)
    gateway.read()
    hashes = hashes_of(prompt)
    for i, value in enumerate(hashes[:-1]):
        middle = (BOUNDARIES[i] + BOUNDARIES[i + 1]) // 2
        assert gateway.held[value] == (middle // BLOCK * BLOCK, 0)
    assert gateway.held[hashes[-1]] == (60, 0), "the next turn of a conversation continues all of it"


def test_copies_of_a_block_are_counted() -> None:
    index = KvBlockIndex(BLOCK)
    engine, gateway = Engine(index), Gateway(index)
    prompt = "abcdefgh"
    engine.send(prompt, gateway)
    keys = block_keys(prompt, BLOCK)
    engine.store(keys[1:], keys[0])
    engine.remove(keys[1])
    gateway.read()
    assert gateway.believes(prompt) == (8, 0)
    engine.remove(keys[1])
    gateway.read()
    assert gateway.believes(prompt) == (4, 0)
    engine.remove(keys[0])
    gateway.read()
    assert not gateway.held


def test_a_prompt_without_a_full_block_is_reported_as_gone() -> None:
    index = KvBlockIndex(64)
    gateway = Gateway(index)
    gateway.read()
    prompt = "abcdefghijkl"
    assert not index.name(NamedPrompt(hashes_of(prompt), BOUNDARIES[:2], 12), block_keys(prompt, 64), 12)
    assert {each.hash: each.tokens for each in gateway.read().gone} == dict.fromkeys(hashes_of(prompt), 0)


def test_a_gone_prefix_is_reported_with_its_tokens_once_it_is_computed_again() -> None:
    index = KvBlockIndex(BLOCK)
    engine, gateway = Engine(index), Gateway(index)
    for end in "xy":
        engine.send("abcdefghijklmnop" + 12 * end, gateway)
        gateway.read()
    index.cleared()
    gone = {each.hash: each.tokens for each in gateway.read().gone}
    assert gone[hash("abcdefghijkl") & ~1] == 16


@pytest.mark.slow
@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=40), max_size=40),
    names=st.integers(1, 12),
    rng=st.randoms(use_true_random=False),
)
def test_names_and_blocks_are_bounded_and_readers_agree(
    prompts: Iterable[str], names: int, rng: random.Random
) -> None:
    """Whatever is sent, evicted or lost: what a reader pieced together is what a new one is told."""
    index = KvBlockIndex(BLOCK, max_names=names)
    engine, gateway = Engine(index), Gateway(index)
    for prompt in prompts:
        engine.send(prompt, gateway)
        if rng.random() < 0.5:
            gateway.read()
        for _ in range(rng.randrange(6)):
            if (key := engine.leaf(rng)) is not None:
                engine.remove(key)
        if rng.random() < 0.05:
            index.lost()
        gateway.read()
        new = Gateway(index)
        new.read()
        assert new.held == gateway.held
        assert len(new.held) <= names
    while (key := engine.leaf(rng)) is not None:
        engine.remove(key)
    index.lost()
    gateway.read()
    assert not gateway.held


class CountedKeys(list[int]):
    """The keys of a prompt, which count how many of them were visited."""

    visited = 0

    def __iter__(self) -> Iterator[int]:
        for key in super().__iter__():
            self.visited += 1
            yield key

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.visited += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("again", [False, True])
def test_the_blocks_of_a_prompt_are_visited_a_few_times_whatever_it_has_of_prefixes(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    upwards = 0

    def counted(block: KvBlock, depth: int) -> Iterator[KvBlock]:
        nonlocal upwards
        for each in engine_block_tree.up(block, depth):
            upwards += 1
            yield each

    monkeypatch.setattr(engine_prefix_index, "up", counted)
    index = KvBlockIndex(BLOCK)
    blocks, prefixes = 1000, 40
    ends = tuple((i + 1) * blocks * BLOCK // prefixes for i in range(prefixes))
    named = NamedPrompt(tuple(range(2, 2 * prefixes + 2, 2)), ends, blocks * BLOCK)
    keys = CountedKeys(range(1, blocks + 1))
    index.stored(list(keys))
    if again:
        index.name(named, keys, blocks * BLOCK)
    keys.visited = upwards = 0
    index.name(named, keys, blocks * BLOCK)
    assert keys.visited <= 4 * blocks
    assert upwards <= 4 * blocks


class WalkingIndex(KvBlockIndex):
    """Finds the last block of each prefix by a walk from the first one."""

    def _path(self, keys: Sequence[int]) -> Any:
        return Walks(super()._path, keys)


class Walks:
    def __init__(self, path: Callable[[Sequence[int]], list[KvBlock]], keys: Sequence[int]) -> None:
        self.path = path
        self.keys = keys

    def __getitem__(self, at: int) -> KvBlock:
        return self.path(self.keys[: len(self.keys) if at < 0 else at + 1])[-1]


def told_of(
    index: KvBlockIndex, prompts: Iterable[str], seed: int, clear: Callable[[Engine], None]
) -> list[Any]:
    """All news while these prompts are sent, blocks are evicted, and everything is cleared now and then."""
    rng = random.Random(seed)  # noqa: S311
    engine, gateway = Engine(index), Gateway(index)
    told = []
    for prompt in prompts:
        engine.send(prompt, gateway)
        for _ in range(rng.randrange(6)):
            if (key := engine.leaf(rng)) is not None:
                if rng.random() < 0.3:
                    engine.offload(key)
                engine.remove(key)
        if rng.random() < 0.1:
            clear(engine)
        if rng.random() < 0.7:
            read = gateway.read()
            held, gone = (sorted(each, key=attrgetter("hash")) for each in (read.held, read.gone))
            told.append((read.reset, held, gone))
    return told


some_prompts = st.lists(st.text("ab", min_size=1, max_size=60), max_size=30)


@given(prompts=some_prompts, names=st.integers(1, 30), seed=st.integers())
def test_one_walk_for_all_prefixes_finds_what_a_walk_for_each_does(
    prompts: Iterable[str], names: int, seed: int
) -> None:
    def lose(engine: Engine) -> None:
        engine.index.lost()

    once, each = (told_of(kind(BLOCK, names), prompts, seed, lose) for kind in (KvBlockIndex, WalkingIndex))
    assert once == each


@given(prompts=some_prompts, names=st.integers(1, 30), seed=st.integers())
def test_all_that_is_cleared_at_once_is_as_if_it_was_removed_one_by_one(
    prompts: Iterable[str], names: int, seed: int
) -> None:
    def clear(engine: Engine) -> None:
        engine.index.cleared()
        engine.index.stored([])  # forgets what is of no use now
        engine.device.clear()

    def remove(engine: Engine) -> None:
        for key in list(engine.device.elements()):
            engine.remove(key)
        engine.index.stored([])
        engine.device.clear()

    at_once, one_by_one = KvBlockIndex(BLOCK, names), KvBlockIndex(BLOCK, names)
    assert told_of(at_once, prompts, seed, clear) == told_of(one_by_one, prompts, seed, remove)
    assert at_once._blocks.keys() == one_by_one._blocks.keys()


class CountingIndex(KvBlockIndex):
    """Counts the blocks that it looks at to update or to forget them."""

    looks = 0

    def _refresh(self, block: KvBlock) -> None:
        self.looks += 1
        super()._refresh(block)

    def _prune(self, block: KvBlock) -> None:
        self.looks += 1
        super()._prune(block)


@pytest.mark.parametrize("event", ["cleared", "lost", "restart"])
def test_what_is_lost_at_once_is_forgotten_a_few_blocks_at_a_time(event: str) -> None:
    index = CountingIndex(BLOCK)
    for number in range(100):
        index.stored(range(100 * number + 1, 100 * number + 101))
    index.name(NamedPrompt((2,), (80,), 80), range(1, 21), 80)
    index.looks = 0
    getattr(index, event)()
    assert index.looks == 0
    assert not index.is_held(2)
    assert index.tokens_of([1]) == (0, 0)
    for _ in range(100):
        index.looks = 0
        index.stored([])
        assert index.looks <= 256
    assert index._blocks.keys() == set(range(21)), "the named ones are left"


def test_named_blocks_are_bounded() -> None:
    index = KvBlockIndex(BLOCK, max_named_blocks=100)
    gateway = Gateway(index)
    gateway.read()
    for number in range(1, 11):
        named = NamedPrompt((20 * number, 20 * number + 2), (60, 120), 120)
        index.name(named, range(1000 * number, 1000 * number + 30), 120)
    assert [number for number in range(1, 11) if index.has(20 * number)] == [8, 9, 10]
    assert len(index._blocks) <= 101
    assert {each.hash for each in gateway.read().gone} >= {20, 22, 140, 142}


def test_a_prompt_of_more_blocks_than_may_be_named_is_forgotten() -> None:
    index = KvBlockIndex(BLOCK, max_named_blocks=10)
    index.name(NamedPrompt((2,), (80,), 80), range(1, 21), 80)
    assert not index.has(2)
    assert len(index._blocks) == 1
