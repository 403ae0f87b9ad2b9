"""Waiting requests in equivalence classes, as in Borg: what holds for one of a class is not asked of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from policy.request import Request


class Requirements(NamedTuple):
    """What a request requires of a replica, apart from time to end before the replica is closed."""

    adapter: str
    avoid: frozenset[str]
    only: frozenset[str] | None


def requirements_of(request: Request) -> Requirements:
    return Requirements(request.adapter, frozenset(request.avoid), request.only)


class EquivalenceClass:
    """The requests with the same requirements, by ticket."""

    __slots__ = ("_shortest", "requests")

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self._shortest: Request | None = None

    def add(self, request: Request) -> None:
        self.requests[request.ticket] = request
        if self._shortest is not None:
            _shorten(self._shortest, request)

    def remove(self, ticket: int) -> None:
        request, shortest = self.requests.pop(ticket), self._shortest
        if shortest is not None and (
            request.prompt_tokens == shortest.prompt_tokens
            or request.output_tokens == shortest.output_tokens
            or request.long_tokens == shortest.long_tokens
        ):
            self._shortest = None

    def any(self) -> Request:
        return next(iter(self.requests.values()))

    def shortest(self) -> Request:
        """An imagined request with the least tokens of each kind: none of them ends earlier."""
        if self._shortest is None:
            sample = self.any()
            self._shortest = shortest = Request(
                sample.model, sample.tenant, sample.priority, sample.adapter, sample.adapter_key,
                sample.prompt_tokens, sample.output_tokens, long_tokens=sample.long_tokens,
                avoid=set(sample.avoid),
            )  # fmt: skip
            shortest.only = sample.only
            for request in self.requests.values():
                _shorten(shortest, request)
        return self._shortest


class EquivalenceClasses:
    """The classes of the requests that wait; a request keeps the one in which it was added."""

    def __init__(self) -> None:
        self.by_adapter: dict[str, dict[Requirements, EquivalenceClass]] = {}
        self._requirements: dict[int, Requirements] = {}
        self._count = 0

    def __len__(self) -> int:
        """The number of classes."""
        return self._count

    def add(self, request: Request) -> None:
        required = self._requirements[request.ticket] = requirements_of(request)
        classes = self.by_adapter.setdefault(required.adapter, {})
        found = classes.get(required)
        if found is None:
            found = classes[required] = EquivalenceClass()
            self._count += 1
        found.add(request)

    def remove(self, request: Request) -> None:
        """Remove it, if it was not removed yet."""
        required = self._requirements.pop(request.ticket, None)
        if required is None:
            return
        classes = self.by_adapter[required.adapter]
        classes[required].remove(request.ticket)
        if not classes[required].requests:
            del classes[required]
            self._count -= 1
        if not classes:
            del self.by_adapter[required.adapter]

    def of(self, adapter: str) -> list[Request]:
        """The requests for ``adapter``."""
        classes = self.by_adapter.get(adapter, {})
        return [request for each in classes.values() for request in each.requests.values()]

    def samples(self, adapters: Iterable[str], *, shortest: bool) -> Iterator[Request]:
        """One request of each class of these ``adapters``: any, or the :meth:`EquivalenceClass.shortest`."""
        for adapter in adapters:
            for each in self.by_adapter[adapter].values():
                yield each.shortest() if shortest else each.any()


def _shorten(shortest: Request, request: Request) -> None:
    shortest.prompt_tokens = min(shortest.prompt_tokens, request.prompt_tokens)
    shortest.output_tokens = min(shortest.output_tokens, request.output_tokens)
    shortest.long_tokens = min(shortest.long_tokens, request.long_tokens)
