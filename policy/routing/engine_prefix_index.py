"""Index of an engine's KV cache: which prefixes that gateways named it holds, by the engine's own events.

A gateway names a prefix of a prompt by a hash of its bytes, the engine a block of KV by its tokens. Both meet
here: each request ties its hashes to the blocks of its prompt. A named prefix that was seen once ends about
where its part of the bytes does. As soon as two prompts share it and nothing deeper, it is worth what they
have in common; nearly all that share it later part at the same place, the end of a system prompt.

Blocks have a chained key (:func:`policy.hashing.block_keys`), which stands for all tokens up to their end. A
block is found by a prompt in device memory if all before it are, and in host memory from there on. Events may
name a block several times, since an engine may hold copies of it: they are counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from policy.routing.engine_block_tree import KvBlock, NamedPrefix, up
from policy.wire.load_stream import CachedPrefix

# About one name per 256 tokens: several times the KV cache of any GPU.
MAX_NAMES = 16_384
# Blocks that have a name, about 0.6 KB each: as many as are followed of what the engine stores.
MAX_NAMED_BLOCKS = 1 << 18
# Changes that are kept for readers; one that missed more receives a snapshot, of at most so many prefixes.
MAX_CHANGES = 4096
MAX_SNAPSHOT = 4096
# No prompt has more prefixes.
MAX_DEPTH = 256
# Blocks that are forgotten with each change after the engine lost all: 250,000 of them take 0.2 s.
FORGOTTEN_AT_ONCE = 256


class NamedPrompt(NamedTuple):
    """The prefixes of one prompt, as its gateway named them.

    ``hashes`` begin with the deepest that the gateway believes cached, if there is one. ``ends`` are the
    estimated tokens up to each, ``tokens`` those of the whole prompt by the same estimate.
    """

    hashes: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: int


class PrefixIndexUpdate(NamedTuple):
    """Changes up to the one numbered ``at``; after ``reset`` nothing is held but ``held``."""

    at: int
    reset: bool
    held: tuple[CachedPrefix, ...]
    gone: tuple[CachedPrefix, ...]


class KvBlockIndex:
    """The blocks and named prefixes of one engine, with blocks of ``block_tokens`` tokens (0: not known yet).

    ``stores`` counts what was stored. It is ``lossy`` where the engine may hold more than is known here.
    """

    def __init__(
        self, block_tokens: int, max_names: int = MAX_NAMES, max_named_blocks: int = MAX_NAMED_BLOCKS
    ) -> None:
        self.block_tokens = block_tokens
        self.stores = 0
        self.lossy = False
        self._max_names = max_names
        self._max_named_blocks = max_named_blocks
        self._root = KvBlock(0, None)
        self._blocks: dict[int, KvBlock] = {0: self._root}
        self._named_blocks = 0
        # The copies of blocks by their keys; the blocks that a prompt finds in device memory, and at all.
        self._device: dict[int, int] = {}
        self._host: dict[int, int] = {}
        self._near = {self._root}
        self._reached = {self._root}
        # Blocks that were known when all was lost, those above before those below: some are of no use now.
        self._left: list[KvBlock] = []
        # The least recently named first; shorter prefixes of a prompt after longer ones.
        self._names: OrderedDict[int, NamedPrefix] = OrderedDict()
        self._dirty: set[int] = set()
        # Blocks that were moved between device and host memory: what is below them is found elsewhere too.
        self._moved: set[KvBlock] = set()
        self._changes: deque[int] = deque(maxlen=MAX_CHANGES)
        self._count = 0
        self._reset_at = 0
        self._watch: Callable[[], None] = lambda: None

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` when there may be news."""
        self._watch = changed

    def stored(self, keys: Iterable[int], parent: int = 0, *, host: bool = False) -> None:
        """The engine stored these consecutive blocks after ``parent``, in device or ``host`` memory.

        Blocks after one that is not known cannot be placed: no prompt that is named here can find them.
        """
        self.stores += 1
        last = self._blocks.get(parent)
        for key in keys:
            if last is None:
                return
            last = self._blocks.get(key) or self._add(key, last)
            if host:
                self._host[key] = self._host.get(key, 0) + 1
            else:
                # After lost events a store may be a repeated one.
                self._device[key] = 1 if self.lossy else self._device.get(key, 0) + 1
            self._refresh(last)
        self._forget_some()
        self._watch()

    def removed(self, key: int, *, host: bool = False) -> None:
        """The engine removed one copy of a block."""
        block = self._blocks.get(key)
        if block is None:
            return
        copies = self._host if host else self._device
        if copies.get(key, 0) > 1:
            copies[key] -= 1
        else:
            copies.pop(key, None)
        self._refresh(block)
        self._prune(block)
        self._watch()

    def holds(self, key: int) -> bool:
        """Whether the engine holds a copy of a block."""
        return key in self._device or key in self._host

    def has(self, value: int) -> bool:
        """Whether this prefix is named here."""
        return value in self._names

    def is_held(self, value: int) -> bool:
        """Whether the engine holds this prefix, as far as it is named here."""
        name = self._names.get(value)
        return name is not None and self._value(name)[0]

    def cleared(self) -> None:
        """The engine removed all blocks from device memory."""
        self._lose(host=False)

    def lost(self) -> None:
        """Events were lost: nothing is held until the engine says so again."""
        self._restart(lossy=True)

    def restart(self) -> None:
        """The engine was replaced by one that holds nothing."""
        self._restart(lossy=False)

    def name(self, prompt: NamedPrompt, keys: Sequence[int], tokens: int, sent_at: int | None = None) -> bool:
        """A prompt of ``tokens`` tokens, with the full blocks ``keys``, goes to the engine.

        It may have been sent before, when ``stores`` was ``sent_at``: what was stored since may be its own.
        Returns whether the engine may hold more of it than is known here, since events were lost.
        """
        hashes = prompt.hashes
        shared = self._shared(keys, self.stores if sent_at is None else sent_at)
        whole = len(keys)
        if not whole:  # too short to be cached
            self.announce(hashes)
            return False
        # The engine always computes the last token.
        most = max(tokens - 1, 0) // self.block_tokens
        doubtful = self.lossy and sum(self.tokens_of(keys[:shared])) < min(shared, most) * self.block_tokens
        known = max((i for i, value in enumerate(hashes) if value in self._names), default=-1)
        if known >= 0:
            end = min(shared, most)
            self._found(hashes[known], end, self._path(keys[: max(end, 1)])[-1])
        # One walk for all prefixes: a long prompt has dozens of them.
        path = self._path(keys) if known + 1 < len(hashes) else []
        least = shared
        for i in range(known + 1, len(hashes)):
            parent = hashes[i - 1] if i else 0
            if i + 1 == len(hashes):
                blocks = whole  # most likely the next prompt repeats or continues this one
            else:
                middle = (prompt.ends[i] + prompt.ends[i + 1]) / (2 * max(prompt.tokens, 1))
                blocks = int(middle * tokens) // self.block_tokens
            least = blocks = min(max(blocks, least), whole)
            self._place(hashes[i], parent, blocks, path[max(blocks, 1) - 1])
        self._use(hashes[-1])
        self._forget_some()
        self._watch()
        return doubtful

    def announce(self, hashes: Iterable[int]) -> None:
        """Report these prefixes again, changed or not: gateways assume them held since they sent them."""
        for value in hashes:
            self._log(value)
        self._watch()

    def news(self, since: int) -> PrefixIndexUpdate:
        """The changes after the one numbered ``since``; a new reader begins with -1."""
        self._collect()
        missed = self._count - since
        if since < self._reset_at or missed > len(self._changes):
            snapshot = []
            for value in reversed(self._names):
                held, tokens, host = self._value(self._names[value])
                if held:
                    snapshot.append(CachedPrefix(value, tokens, host))
                if len(snapshot) == MAX_SNAPSHOT:
                    break
            return PrefixIndexUpdate(self._count, True, tuple(snapshot), ())
        news_held, news_gone = [], []
        for value in set(islice(reversed(self._changes), missed)):
            name = self._names.get(value)
            if name is None:
                news_gone.append(CachedPrefix(value, 0))
                continue
            held, tokens, host = self._value(name)
            if held:
                news_held.append(CachedPrefix(value, tokens, host))
            else:
                news_gone.append(CachedPrefix(value, name.blocks * self.block_tokens))
        return PrefixIndexUpdate(self._count, False, tuple(news_held), tuple(news_gone))

    def tokens_of(self, keys: Sequence[int]) -> tuple[int, int]:
        """The tokens that a prompt of these blocks finds in device memory, and further in host memory."""
        near = reached = 0
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block not in self._reached:
                break
            near += block in self._near
            reached += 1
        return near * self.block_tokens, (reached - near) * self.block_tokens

    def _shared(self, keys: Sequence[int], sent_at: int) -> int:
        """How many leading blocks of a prompt that was sent then are known from others."""
        for index, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None or (block.since > sent_at and not block.names):
                return index
        return len(keys)

    def _path(self, keys: Sequence[int]) -> list[KvBlock]:
        """These blocks of a prompt, from its first."""
        path, block = [], self._root
        for key in keys:
            block = self._blocks.get(key) or self._add(key, block)
            path.append(block)
        return path

    def _found(self, value: int, blocks: int, block: KvBlock) -> None:
        """A prompt shares ``blocks`` blocks and the prefix ``value``, but nothing deeper that is known.

        Shorter prefixes cannot be worth more.
        """
        while (name := self._names.get(value)) is not None:
            self._place(value, name.parent, blocks, block)
            value = name.parent
            if (shorter := self._names.get(value)) is None or shorter.blocks <= blocks:
                return

    def _place(self, value: int, parent: int, blocks: int, block: KvBlock) -> None:
        """The prefix ``value`` is worth ``blocks`` blocks: ``block`` is their last, or the next."""
        name, before = self._names.get(value), None
        if name is None:
            name = self._names[value] = NamedPrefix(parent, block)
        elif name.block is block and name.blocks == blocks:
            return
        else:
            before = name.block
            self._untie(value, name)
        above = self._names.get(parent)
        name.block, name.blocks = block, blocks
        for each in up(block, min(max(1, above.blocks if above else 1), block.depth)):
            self._named_blocks += not each.names
            each.names.add(value)
            name.first = each
        if before is not None:
            self._prune(before)
        self._dirty.add(value)

    def _untie(self, value: int, name: NamedPrefix) -> None:
        for each in up(name.block, name.first.depth):
            each.names.remove(value)
            self._named_blocks -= not each.names

    def _use(self, value: int) -> None:
        """``value`` was named: it and what is shorter are forgotten last."""
        for _ in range(MAX_DEPTH):
            if value not in self._names:
                break
            self._names.move_to_end(value)
            value = self._names[value].parent
        while len(self._names) > self._max_names or self._named_blocks > self._max_named_blocks:
            value, name = self._names.popitem(last=False)
            self._untie(value, name)
            self._prune(name.block)
            self._dirty.discard(value)
            self._log(value)

    def _add(self, key: int, parent: KvBlock) -> KvBlock:
        block = self._blocks[key] = KvBlock(key, parent, self.stores)
        parent.children.add(block)
        return block

    def _prune(self, block: KvBlock) -> None:
        """Forget ``block`` and those above it, as far as nothing depends on them."""
        while (parent := block.parent) is not None:
            if block.children or block.names or self.holds(block.key):
                return
            parent.children.discard(block)
            del self._blocks[block.key]
            self._moved.discard(block)
            block = parent

    def _refresh(self, block: KvBlock) -> None:
        """Copies of ``block`` came or went: update where it and what continues it are found."""
        stack = [block]
        while stack:
            block = stack.pop()
            assert block.parent is not None
            near = block.key in self._device and block.parent in self._near
            reached = near or (block.key in self._host and block.parent in self._reached)
            was_reached = block in self._reached
            if near == (block in self._near) and reached == was_reached:
                continue
            if reached and was_reached:
                self._moved.add(block)
            (self._near.add if near else self._near.discard)(block)
            (self._reached.add if reached else self._reached.discard)(block)
            self._dirty |= block.names
            stack.extend(block.children)

    def _restart(self, *, lossy: bool) -> None:
        self._lose(host=True)
        self.lossy = lossy
        self._count += 1
        self._reset_at = self._count

    def _lose(self, *, host: bool) -> None:
        """Nothing is in device memory any more, nor with ``host`` in host memory.

        What is of no use then is forgotten later, a few blocks at a time.
        """
        self._device.clear()
        if host:
            self._host.clear()
        self._near = {self._root}
        self._reached = {self._root}
        stack = [self._root] if self._host else []
        while stack:
            found = [child for child in stack.pop().children if child.key in self._host]
            self._reached.update(found)
            stack += found
        self._moved.clear()
        self._dirty.update(self._names)
        self._left = list(self._blocks.values())
        self._watch()

    def _forget_some(self) -> None:
        for _ in range(min(FORGOTTEN_AT_ONCE, len(self._left))):
            block = self._left.pop()
            if self._blocks.get(block.key) is block:
                self._prune(block)

    def _collect(self) -> None:
        """Log the prefixes of which readers know something else than what is true now."""
        seen: set[KvBlock] = set()
        stack = list(self._moved)
        while stack:
            block = stack.pop()
            if block not in seen:
                seen.add(block)
                self._dirty |= block.names
                stack += block.children & self._reached
        self._moved.clear()
        for value in self._dirty:
            name = self._names[value]
            if (found := self._value(name)) != name.reported:
                name.reported = found
                self._log(value)
        self._dirty.clear()

    def _value(self, name: NamedPrefix) -> tuple[bool, int, int]:
        """Whether it is held, and its tokens in device memory and in host memory.

        It is not held if no more than the next shorter prefix is: that one tells the rest.
        """
        if name.first not in self._reached:
            return False, 0, 0
        block = next(each for each in up(name.block, name.first.depth) if each in self._reached)
        found = min(block.depth, name.blocks)
        while block not in self._near:
            assert block.parent is not None
            block = block.parent
        device = min(block.depth, found)
        return True, device * self.block_tokens, (found - device) * self.block_tokens

    def _log(self, value: int) -> None:
        self._changes.append(value)
        self._count += 1
