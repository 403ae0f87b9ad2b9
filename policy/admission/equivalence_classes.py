"""Waiting requests in equivalence classes, as in Borg: what holds for one of a class is not asked of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import islice
from typing import NamedTuple, TypeVar

from policy.request import Request

K = TypeVar("K")
V = TypeVar("V")


class Requirements(NamedTuple):
    """What a request requires of a replica, apart from time to end before the replica is closed."""

    adapter: str
    avoid: frozenset[str]
    only: frozenset[str] | None


def requirements_of(request: Request) -> Requirements:
    return Requirements(request.adapter, frozenset(request.avoid), request.only)


class Key(NamedTuple):
    """What the requests of a class share: before a replica is closed, short ones fit where long ones do not.

    Lengths are the binary digits of the numbers of tokens: of prompts, and of answers if they are long.
    """

    required: Requirements
    prompt_length: int
    answer_length: int


def key_of(request: Request) -> Key:
    return Key(requirements_of(request), request.prompt_tokens.bit_length(), request.long_tokens.bit_length())


class EquivalenceClass:
    """The requests with the same key, by ticket.

    :attr:`shortest` is an imagined one with no more tokens of any kind than any of them: none ends earlier.
    """

    __slots__ = ("requests", "shortest")

    def __init__(self, like: Request, key: Key) -> None:
        self.requests: dict[int, Request] = {}
        self.shortest = Request(
            like.model, like.tenant, like.priority, like.adapter, like.adapter_key,
            prompt_tokens=_least(key.prompt_length), long_tokens=_least(key.answer_length),
            avoid=set(key.required.avoid),
        )  # fmt: skip
        self.shortest.only = key.required.only

    def rotate(self, most: int) -> list[Request]:
        """At most so many of its requests, others with each call until each had its turn."""
        return _rotate(self.requests, list(islice(self.requests, most)))

    def sample(self, *, shortest: bool) -> Request:
        """Any of its requests, or the :attr:`shortest`."""
        return self.shortest if shortest else next(iter(self.requests.values()))


class EquivalenceClasses:
    """The classes of the requests that wait; a request keeps the one in which it was added."""

    def __init__(self) -> None:
        self.by_adapter: dict[str, dict[Key, EquivalenceClass]] = {}
        self._keys: dict[int, Key] = {}

    def add(self, request: Request) -> None:
        key = self._keys[request.ticket] = key_of(request)
        classes = self.by_adapter.setdefault(key.required.adapter, {})
        found = classes.get(key)
        if found is None:
            found = classes[key] = EquivalenceClass(request, key)
        found.requests[request.ticket] = request

    def remove(self, request: Request) -> None:
        """Remove it, if it was not removed yet."""
        key = self._keys.pop(request.ticket, None)
        if key is None:
            return
        adapter = key.required.adapter
        classes = self.by_adapter[adapter]
        del classes[key].requests[request.ticket]
        if not classes[key].requests:
            del classes[key]
        if not classes:
            del self.by_adapter[adapter]

    def of(self, adapter: str) -> Iterator[Request]:
        """The requests for ``adapter``."""
        for each in self.by_adapter.get(adapter, {}).values():
            yield from each.requests.values()

    def rotate(self, adapters: Set[str], most: int) -> list[EquivalenceClass]:
        """At most so many classes of these ``adapters``, others with each call until each had its turn."""
        found: list[EquivalenceClass] = []
        names = (name for name in self.by_adapter if name in adapters)
        for name in list(islice(names, most)):
            if len(found) == most:
                break
            (classes,) = _rotate(self.by_adapter, [name])
            found += _rotate(classes, list(islice(classes, most - len(found))))
        return found

    def samples(self, adapters: Iterable[str], *, shortest: bool) -> Iterator[Request]:
        """The :meth:`EquivalenceClass.sample` of each class of these ``adapters``."""
        for adapter in adapters:
            for each in self.by_adapter[adapter].values():
                yield each.sample(shortest=shortest)


def _rotate(members: dict[K, V], keys: list[K]) -> list[V]:
    """The members with these ``keys``, which become the last ones."""
    found = []
    for key in keys:
        members[key] = member = members.pop(key)
        found.append(member)
    return found


def _least(length: int) -> int:
    """The least number with so many binary digits."""
    return 1 << length >> 1
