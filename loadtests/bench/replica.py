"""A simulated replica of the routing benchmark: prefix cache, adapter slots and bounded prefill."""

from __future__ import annotations

from collections import Counter, OrderedDict
from heapq import heapreplace
from typing import NamedTuple

import msgspec

CHARS_PER_TOKEN = 4


class MockReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of replicas. Durations are seconds; tokens are prompt tokens.

    A streamed answer has ``chunks`` events, ``gap_s`` apart. The first comes after a prefill on one of
    ``lanes``: ``base_s`` plus ``token_s`` for each uncached token, times ``slow``. ``token_s`` 0 answers at
    once. An adapter that is not in one of ``slots`` takes ``load_s`` more.
    """

    chunks: int = 64
    gap_s: float = 0.01
    base_s: float = 0.0
    token_s: float = 0.0
    lanes: int = 4
    cache_tokens: int = 1 << 60
    slots: int = 8
    load_s: float = 0.0
    slow: float = 1.0
    adapters: int = 0


class MockReplicaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one replica: requests by prefix, prefills without a cache hit, adapter loads."""

    requests: int = 0
    cold: int = 0
    loads: int = 0
    by_prefix: dict[int, int] = {}


class PromptMarker(NamedTuple):
    """The mark of a prompt: its shared prefix, and the tokens of the prefix and of the whole."""

    prefix: int
    prefix_tokens: int
    tokens: int


def marked(prefix: int, prefix_chars: int, chars: int) -> str:
    """The mark at the start of a prompt, of fixed width; lengths in characters, the mark's own included."""
    return f"[p{prefix:06d}:{prefix_chars:07d}:{chars:07d}]"


MARK_CHARS = len(marked(0, 0, 0))


def read_mark(body: bytes) -> PromptMarker | None:
    """The mark of the first prompt in ``body`` that has one."""
    at = body.find(b"[p", 0, 4096)
    if at < 0 or body[at + MARK_CHARS - 1 : at + MARK_CHARS] != b"]":
        return None
    prefix, own, whole = body[at + 2 : at + MARK_CHARS - 1].split(b":")
    return PromptMarker(int(prefix), int(own) // CHARS_PER_TOKEN, int(whole) // CHARS_PER_TOKEN)


class MockReplica:
    """The caches and the queue of one replica."""

    def __init__(self, setting: MockReplicaSettings) -> None:
        self.configure(setting)

    def configure(self, setting: MockReplicaSettings) -> None:
        """Set the behaviour; caches and counts start empty."""
        self.setting = setting
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._cached_tokens = 0
        self._adapters: OrderedDict[str, None] = OrderedDict()
        self._free_at = [0.0] * setting.lanes
        self._by_prefix: Counter[int] = Counter()
        self._cold = self._loads = 0

    def slow_down(self, factor: float) -> None:
        """Multiply the time of every prefill by ``factor``, with caches as they are."""
        self.setting = msgspec.structs.replace(self.setting, slow=factor)

    def counts(self) -> MockReplicaCounts:
        """The counts since the last :meth:`configure`."""
        return MockReplicaCounts(
            requests=self._by_prefix.total(),
            by_prefix=dict(self._by_prefix),
            cold=self._cold,
            loads=self._loads,
        )

    def arrive(self, mark: PromptMarker, adapter: str, at: float) -> float:
        """Take a request; returns the instant of its first token.

        Prefills run in order of arrival, each on the lane that is free first. A prefix is cached when its
        prefill begins, as in an engine that schedules two requests in one step.
        """
        self._by_prefix[mark.prefix] += 1
        setting = self.setting
        work = setting.base_s + setting.token_s * (mark.tokens - self._hit(mark))
        if adapter:
            work += self._load(adapter)
        work *= setting.slow
        first = max(at, self._free_at[0]) + work
        heapreplace(self._free_at, first)
        return first

    def _hit(self, mark: PromptMarker) -> int:
        """Tokens that need no prefill; the prefix is the most recently used from now on."""
        cached = self._cached
        if mark.prefix in cached:
            cached.move_to_end(mark.prefix)
            return mark.prefix_tokens
        self._cold += 1
        cached[mark.prefix] = mark.prefix_tokens
        self._cached_tokens += mark.prefix_tokens
        while self._cached_tokens > self.setting.cache_tokens:
            self._cached_tokens -= cached.popitem(last=False)[1]
        return 0

    def _load(self, adapter: str) -> float:
        """Seconds until ``adapter`` is in a slot."""
        slots = self._adapters
        if adapter in slots:
            slots.move_to_end(adapter)
            return 0.0
        self._loads += 1
        slots[adapter] = None
        if len(slots) > self.setting.slots:
            slots.popitem(last=False)
        return self.setting.load_s
