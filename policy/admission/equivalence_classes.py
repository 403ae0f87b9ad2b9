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


class EquivalenceKey(NamedTuple):
    """What the requests of a class share: before a replica is closed, short ones fit where long ones do not.

    Lengths are the binary digits of the numbers of tokens: of prompts, and of answers if they are long.
    """

    required: Requirements
    prompt_length: int
    answer_length: int


def key_of(request: Request) -> EquivalenceKey:
    return EquivalenceKey(
        requirements_of(request), request.prompt_tokens.bit_length(), request.long_tokens.bit_length()
    )


class EquivalenceClass:
    """The requests with the same key, by ticket."""

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

    def sample(self, *, shortest: bool) -> Request:
        """Any of its requests, or the :meth:`shortest`."""
        return self.shortest() if shortest else next(iter(self.requests.values()))

    def shortest(self) -> Request:
        """An imagined request with the least tokens of each kind: none of them ends earlier."""
        if self._shortest is None:
            sample = self.sample(shortest=False)
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
        self.by_adapter: dict[str, dict[EquivalenceKey, EquivalenceClass]] = {}
        self._keys: dict[int, EquivalenceKey] = {}

    def add(self, request: Request) -> None:
        key = self._keys[request.ticket] = key_of(request)
        classes = self.by_adapter.setdefault(key.required.adapter, {})
        found = classes.get(key)
        if found is None:
            found = classes[key] = EquivalenceClass()
        found.add(request)

    def remove(self, request: Request) -> None:
        """Remove it, if it was not removed yet."""
        key = self._keys.pop(request.ticket, None)
        if key is None:
            return
        adapter = key.required.adapter
        classes = self.by_adapter[adapter]
        classes[key].remove(request.ticket)
        if not classes[key].requests:
            del classes[key]
        if not classes:
            del self.by_adapter[adapter]

    def of(self, adapter: str) -> Iterator[Request]:
        """The requests for ``adapter``."""
        for each in self.by_adapter.get(adapter, {}).values():
            yield from each.requests.values()

    def samples(self, adapters: Iterable[str], *, shortest: bool) -> Iterator[Request]:
        """The :meth:`EquivalenceClass.sample` of each class of these ``adapters``."""
        for adapter in adapters:
            for each in self.by_adapter[adapter].values():
                yield each.sample(shortest=shortest)


def _shorten(shortest: Request, request: Request) -> None:
    shortest.prompt_tokens = min(shortest.prompt_tokens, request.prompt_tokens)
    shortest.output_tokens = min(shortest.output_tokens, request.output_tokens)
    shortest.long_tokens = min(shortest.long_tokens, request.long_tokens)
