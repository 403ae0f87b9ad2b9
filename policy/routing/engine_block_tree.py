"""The tree of blocks that an index of a KV cache knows, and the named prefixes that end in it."""

from __future__ import annotations

from collections.abc import Iterator


class KvBlock:
    """A block. ``names`` are the prefixes whose report depends on it. Known since the store ``since``."""

    __slots__ = ("children", "depth", "key", "names", "parent", "since")

    def __init__(self, key: int, parent: KvBlock | None, since: int = 0) -> None:
        self.key = key
        self.since = since
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: set[KvBlock] = set()
        self.names: set[int] = set()


class NamedPrefix:
    """A named prefix, worth ``blocks`` blocks; ``block`` is the last of them, or the first one after it.

    ``parent`` is the next shorter prefix. It was registered at the blocks from ``first`` on.
    ``reported`` is what readers know.
    """

    __slots__ = ("block", "blocks", "first", "parent", "reported")

    def __init__(self, parent: int, block: KvBlock) -> None:
        self.parent = parent
        self.block = self.first = block
        self.blocks = 0
        self.reported: tuple[bool, int, int] | None = None


def up(block: KvBlock, depth: int) -> Iterator[KvBlock]:
    """``block`` and those above it, as far as they are at least that deep."""
    at: KvBlock | None = block
    while at is not None and at.depth >= depth:
        yield at
        at = at.parent
