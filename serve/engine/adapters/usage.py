"""What was done with each adapter, added up until somebody takes it."""

from __future__ import annotations

from policy.wire.heartbeat import AdapterUse


class AdapterUsage:
    """Counts by name and whole digest; what is counted is bounded by who takes it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], AdapterUse] = {}

    def add(
        self,
        name: str,
        digest: str,
        *,
        requests: int = 0,
        found: int = 0,
        loads: int = 0,
        load_s: float = 0.0,
        failed: str = "",
        busy_s: float = 0.0,
        waiting: int = 0,
    ) -> None:
        """Add to what is kept; a load that succeeded says that the trouble of the one before is over."""
        last = self._kept.get((name, digest)) or AdapterUse(name=name, digest=digest)
        self._kept[name, digest] = AdapterUse(
            name=name,
            digest=digest,
            requests=last.requests + requests,
            found=last.found + found,
            loads=last.loads + loads,
            load_s=last.load_s + load_s,
            failed="" if loads else failed or last.failed,
            busy_s=last.busy_s + busy_s,
            waiting=last.waiting + waiting,
        )

    def take(self) -> tuple[AdapterUse, ...]:
        """All of it, which is kept no longer."""
        uses, self._kept = tuple(self._kept.values()), {}
        return uses
