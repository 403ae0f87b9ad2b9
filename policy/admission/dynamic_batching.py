"""Coalescing of requests that can share one upstream call.

Nagle's algorithm (RFC 896) with a bound: a request of an idle group is sent at once. While a call of its
group is in progress it waits for others, until the window ends, the batch is full, or the last call in
progress has returned, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RequestBatch(Generic[T]):
    """Members of one call, with ``inputs`` of them in all; a waiting batch is sent at ``due``."""

    group: Hashable
    due: float
    inputs: int = 0
    members: dict[T, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Group(Generic[T]):
    in_progress: int = 0
    waiting: RequestBatch[T] | None = None


class BatchingWindows(Generic[T]):
    """The groups of one gateway worker. Instants are seconds of one monotonic clock.

    A group is what its members have in common; it is kept while a call of it is in progress or waits. Every
    batch that is returned must be ended by :meth:`ended`.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group[T]] = {}
        self._waiting: dict[RequestBatch[T], None] = {}

    @property
    def next_due(self) -> float | None:
        """When the next waiting batch is due; ``None`` while none waits."""
        return min((batch.due for batch in self._waiting), default=None)

    def arrive(
        self, group: Hashable, member: T, inputs: int, at: float, *, window_s: float, most: int
    ) -> list[RequestBatch[T]]:
        """Add ``member`` with ``inputs``; returns the batches to send now, in order.

        ``most`` bounds the inputs of a batch, and of a member.
        """
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = _Group()
        ready = []
        if found.waiting is not None and found.waiting.inputs + inputs > most:
            ready.append(self._send(found))
        if found.waiting is None:
            found.waiting = RequestBatch(group, at + window_s)
            self._waiting[found.waiting] = None
        batch = found.waiting
        batch.members[member] = inputs
        batch.inputs += inputs
        if not found.in_progress or batch.inputs >= most:
            ready.append(self._send(found))
        return ready

    def withdraw(self, group: Hashable, member: T) -> bool:
        """Take out ``member``; returns whether it still waited."""
        found = self._groups.get(group)
        if found is None or found.waiting is None or member not in found.waiting.members:
            return False
        batch = found.waiting
        batch.inputs -= batch.members.pop(member)
        if not batch.members:
            del self._waiting[batch]
            found.waiting = None
        return True

    def due(self, at: float) -> list[RequestBatch[T]]:
        """The batches whose window has ended."""
        over = [batch for batch in self._waiting if batch.due <= at]
        return [self._send(self._groups[batch.group]) for batch in over]

    def ended(self, batch: RequestBatch[T]) -> RequestBatch[T] | None:
        """The call of ``batch`` has returned; returns the batch to send now, if any."""
        found = self._groups[batch.group]
        found.in_progress -= 1
        if found.in_progress:
            return None
        if found.waiting is not None:
            return self._send(found)
        del self._groups[batch.group]
        return None

    def _send(self, group: _Group[T]) -> RequestBatch[T]:
        batch, group.waiting = group.waiting, None
        assert batch is not None
        del self._waiting[batch]
        group.in_progress += 1
        return batch


def apportion(total: int, weights: list[int]) -> list[int]:
    """``total`` in whole parts in proportion to ``weights``; they sum to it exactly.

    Hamilton's method: each gets the whole part of its quota, the largest remainders get one more; of equal
    remainders the first. Weights that are all 0 count as equal.
    """
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    parts = [total * weight // whole for weight in weights]
    short = total - sum(parts)
    order = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in order[:short]:
        parts[i] += 1
    return parts
