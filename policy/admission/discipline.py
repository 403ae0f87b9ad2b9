"""What a queue asks of the order in which it serves: the seam for another one (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

from policy.request import Request

Charge = TypeVar("Charge")


class QueueOrder(NamedTuple):
    """A request, and the ``tag`` of its turn: turns go by growing tags, in weighted tokens served."""

    request: Request
    tag: float


class Discipline(Protocol[Charge]):
    """The order among the requests of one priority class. ``tokens`` are expected of those that wait.

    ``Charge`` is its receipt for what it charged, which nobody else reads.
    """

    tokens: int

    def __len__(self) -> int:
        """How many wait."""

    def add(self, request: Request, *, returned: bool) -> None:
        """It waits; ``returned`` if a replica sent it back, which spares it from :meth:`spare`."""

    def remove(self, request: Request) -> None:
        """It waits no more."""

    def walk(self) -> Iterator[QueueOrder]:
        """All that wait, in the order in which they would be served; nothing may change meanwhile."""

    def charge(self, request: Request) -> Charge:
        """It begins, having waited or not; what waited was removed before."""

    def settle(self, charge: Charge, tokens: int) -> None:
        """It cost ``tokens`` in truth; 0 takes all back. May be said again."""

    def ended(self, charge: Charge) -> None:
        """It runs no more."""

    def ahead(self, newcomer: Request) -> float:
        """About how many tokens of this class would be served before ``newcomer``."""

    def hear(self) -> None:
        """Take note of what others than this queue serve, if it counts that; said now and then."""

    def spare(self, newcomer: Request | None) -> Request | None:
        """Who makes room for ``newcomer`` of this class, or for one of a better class (``None``)."""
