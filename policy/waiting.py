"""A bounded first-come queue with deadlines, where a refused entry returns to its old place."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """Entries in the order of their tickets, each with a deadline (seconds, any monotonic clock).

    A ticket is the order of arrival and stays with its entry, so whoever was sent away by a busy
    replica stands again before all who came later. All operations are O(log n).
    """

    def __init__(self) -> None:
        self._next = 0
        self._entries: dict[int, tuple[T, float]] = {}
        self._order: list[int] = []
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def ticket(self) -> int:
        """The next place in the order of arrival."""
        self._next += 1
        return self._next

    def put(self, ticket: int, entry: T, deadline: float) -> None:
        """Stand at ``ticket`` until ``deadline``; a ticket holds one entry at a time."""
        if ticket in self._entries:
            raise ValueError(f"ticket {ticket} already waits")
        self._entries[ticket] = (entry, deadline)
        heapq.heappush(self._order, ticket)
        heapq.heappush(self._deadlines, (deadline, ticket))

    def remove(self, ticket: int) -> bool:
        """Leave the queue; whether the entry was still in it."""
        if self._entries.pop(ticket, None) is None:
            return False
        # What left is skipped when it surfaces; once most are gone, rebuilding is cheaper to hold.
        if len(self._order) > 64 and len(self._order) > 4 * len(self._entries):
            self._order = sorted(self._entries)
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * len(self._entries):
            self._deadlines = sorted((deadline, t) for t, (_, deadline) in self._entries.items())
        return True

    def in_order(self) -> Iterator[tuple[int, T]]:
        """Entries from the oldest on; entries may be removed while walking."""
        walked: list[int] = []
        try:
            while self._order:
                ticket = heapq.heappop(self._order)
                held = self._entries.get(ticket)
                if held is None or (walked and walked[-1] == ticket):
                    continue
                walked.append(ticket)
                yield ticket, held[0]
        finally:
            for ticket in walked:
                if ticket in self._entries:
                    heapq.heappush(self._order, ticket)

    def expire(self, at: float) -> list[T]:
        """Remove and return every entry whose deadline is not after ``at``, earliest first."""
        expired: list[T] = []
        while self._deadlines and self._deadlines[0][0] <= at:
            deadline, ticket = heapq.heappop(self._deadlines)
            held = self._entries.get(ticket)
            if held is not None and held[1] == deadline:
                del self._entries[ticket]
                expired.append(held[0])
        return expired

    def next_deadline(self) -> float | None:
        """The earliest deadline of an entry that waits."""
        while self._deadlines:
            deadline, ticket = self._deadlines[0]
            held = self._entries.get(ticket)
            if held is not None and held[1] == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None
