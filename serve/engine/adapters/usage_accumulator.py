"""Adapter usage that has not been reported yet, added up by adapter."""

from __future__ import annotations

from policy.wire.heartbeat import AdapterUse

# Versions that are kept while nothing takes the reports.
MAX_VERSIONS = 4096


class AdapterUsageAccumulator:
    """One :class:`AdapterUse` for each version; beyond :data:`MAX_VERSIONS` the oldest are dropped."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], AdapterUse] = {}

    def add(self, use: AdapterUse) -> None:
        """Add what happened since."""
        key = (use.name, use.digest)
        before = self._uses.pop(key, None)
        self._uses[key] = use if before is None else before.plus(use)
        if len(self._uses) > MAX_VERSIONS:
            del self._uses[next(iter(self._uses))]

    def pending(self) -> tuple[AdapterUse, ...]:
        """Everything that was added and not yet cleared, the least recently used first."""
        return tuple(self._uses.values())

    def clear(self) -> None:
        """Everything pending has been reported."""
        self._uses.clear()
