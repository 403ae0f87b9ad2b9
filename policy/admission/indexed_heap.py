"""Members in the order of a key that may change while they are in it."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")
_Entry = tuple[float, int, int, T]


class IndexedHeap(Generic[T]):
    """Least key first, ties by ``then``, then in order of insertion; operations are O(log n), amortised.

    A heap whose outdated entries are skipped when they surface, and removed once they are most of it. An
    entry is current while it is its member's last; ``puts`` numbers the last entry of each member.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry[T]] = []
        self.puts: dict[T, int] = {}
        self._puts = 0

    def __len__(self) -> int:
        return len(self.puts)

    def __contains__(self, member: T) -> bool:
        return member in self.puts

    def put(self, member: T, key: float, then: int = 0) -> None:
        self._puts += 1
        self.puts[member] = self._puts
        heappush(self._heap, (key, then, self._puts, member))
        self._compact()

    def drop(self, member: T) -> bool:
        """Remove it; returns whether it was in the set."""
        if self.puts.pop(member, None) is None:
            return False
        if self.puts:
            self._compact()
        else:
            self._heap.clear()
        return True

    def least(self) -> tuple[T, float] | None:
        heap, current = self._heap, self.puts
        while heap:
            entry = heap[0]
            if current.get(entry[3]) == entry[2]:
                return entry[3], entry[0]
            heappop(heap)
        return None

    def __iter__(self) -> Iterator[tuple[T, float]]:
        """Members with their keys in order, each in O(log n); the set must not change meanwhile."""
        # In a queue the outdated entries are the first ones.
        self.least()
        heap, current = self._heap, self.puts
        # The next entry is a child of one that was visited.
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            entry, at = heappop(ahead)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heappush(ahead, (heap[child], child))
            if current.get(entry[3]) == entry[2]:
                yield entry[3], entry[0]

    def _compact(self) -> None:
        if len(self._heap) > 64 + 2 * len(self.puts):
            self._heap = [entry for entry in self._heap if self.puts.get(entry[3]) == entry[2]]
            heapify(self._heap)
