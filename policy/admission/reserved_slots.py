"""Slots reserved for tenants below their share, so that these need not wait for one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

# A tenant is active for so long after its last request.
ACTIVE_S = 10.0
# One slot is reserved, and one more in so many. With one alone, the second of two requests that come together
# waited 57 ms in the mean on eight slots of 0.4 s each; of two requests a second these were 11 %.
ONE_IN = 16


class ReservedSlots:
    """The tenants of one model in one worker; ``weight`` is a tenant's share.

    ``contended`` is whether more than one of them was active lately.

    In fair order alone a quiet tenant waits until a request of a loud one ends, which may take longer than
    its own prefill. While two or more are active, a tenant that runs more than its share leaves the last
    slots to the others.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._active: dict[str, float] = {}
        self._running: Counter[str] = Counter()
        self.contended = False

    def came(self, tenant: str, at: float) -> None:
        """A request of ``tenant`` came, at ``at`` (seconds, monotonic)."""
        active = self._active
        active.pop(tenant, None)
        active[tenant] = at  # the least recent stands first
        while (oldest := next(iter(active))) != tenant and active[oldest] < at - ACTIVE_S:
            del active[oldest]
        self.contended = len(active) > 1

    def began(self, tenant: str) -> None:
        """A request of ``tenant`` runs."""
        self._running[tenant] += 1

    def ended(self, tenant: str) -> None:
        """A request of ``tenant`` no longer runs."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def kept_from(self, tenant: str, free: int, replicas: int) -> int:
        """How many of the ``free`` slots ``tenant`` leaves on each replica; -1 if it may take none.

        They are spread over the replicas: on one replica, two requests that come together would wait for each
        other's prompts.
        """
        if not self.contended:
            return 0
        slots = free + self._running.total()
        weights = sum(self._weight(name) for name in self._active)
        if self._running[tenant] < slots * self._weight(tenant) / weights:
            return 0
        kept = 1 + math.ceil(slots / ONE_IN)
        return kept // replicas if free > kept else -1
