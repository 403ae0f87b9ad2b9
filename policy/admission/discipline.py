"""The queueing discipline: the port for another order of service (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

from policy.request import Request

Charge = TypeVar("Charge")


class QueueOrder(NamedTuple):
    """A request and its virtual start ``tag`` in weighted tokens; requests are served in order of tags."""

    request: Request
    tag: float


class Discipline(Protocol[Charge]):
    """The order among the requests of one priority. ``tokens`` is the expected cost of those that wait.

    ``Charge`` is an opaque receipt for what was charged.
    """

    tokens: int

    def __len__(self) -> int:
        """How many requests wait."""

    def add(self, request: Request, *, returned: bool) -> None:
        """Queue it; ``returned`` if a replica sent it back, which protects it from :meth:`spare`."""

    def remove(self, request: Request) -> None:
        """Take it out of the queue."""

    def walk(self) -> Iterator[QueueOrder]:
        """All waiting requests in the order of service; the queue must not change meanwhile."""

    def charge(self, request: Request) -> Charge:
        """Charge a request that begins; one that waited was removed before."""

    def settle(self, charge: Charge, tokens: int) -> None:
        """Correct the charge to ``tokens``; 0 takes it back. May be called again."""

    def ended(self, charge: Charge) -> None:
        """The request no longer runs."""

    def ahead(self, newcomer: Request) -> float:
        """About how many tokens of this priority would be served before ``newcomer``."""

    def hear(self) -> None:
        """Count what other workers serve, if the discipline does so; called regularly."""

    def spare(self, newcomer: Request | None) -> Request | None:
        """The request that makes room for ``newcomer`` of this priority, or of a higher one (``None``)."""
