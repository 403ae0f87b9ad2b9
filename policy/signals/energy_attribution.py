"""The energy of GPUs, attributed to models and adapters by the tokens that were computed meanwhile.

Every uncached prompt token and every token of an answer counts the same. Tokens are counted when a request
ends, so intervals are long beside a request.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from policy.types import Replica, ReplicaPhase

INTERVAL_S = 60.0
# Labels that no adapter can have: names begin with a letter or a digit. The energy of the model without an
# adapter, of adapters beyond the bound, and of intervals without a token.
BASE, OTHERS, IDLE = "_base", "_other", "_idle"
MOST = 500
# The power of a rack of 72 GPUs: no replica takes more. A counter that grows faster began to include a GPU
# with all that it took since its driver was loaded. Reports may come this much later than they were made.
MOST_WATTS = 100e3
LATE_S = 10.0


@dataclass(slots=True)
class _Interval:
    """What was spent and computed for one model since ``began``."""

    began: float
    joules: float = 0.0
    tokens: Counter[str] = field(default_factory=Counter)


class EnergyAttribution:
    """Totals by model and adapter: ``joules``, and the ``tokens`` that they were spent on."""

    def __init__(self) -> None:
        self.joules: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.tokens: Counter[tuple[str, str]] = Counter()
        # The last counter of each replica, and when it came.
        self._counters: dict[str, tuple[float, float]] = {}
        self._intervals: dict[str, _Interval] = {}

    def spent(self, replica: Replica, joules: float, at: float) -> None:
        """Take the energy counter of a replica's GPUs; one that sleeps has lent them to others."""
        before, came_at = self._counters.get(replica.id, (joules, at))
        self._counters[replica.id] = joules, at
        interval = self._interval(replica.model, at)
        plausible = 0.0 < joules - before <= MOST_WATTS * (at - came_at + LATE_S)
        if plausible and replica.state is not ReplicaPhase.ASLEEP:
            interval.joules += joules - before
        if at - interval.began >= INTERVAL_S:
            self._attribute(replica.model, self._intervals.pop(replica.model))

    def forget(self, replica: str) -> None:
        """Forget a replica that has ended."""
        self._counters.pop(replica, None)

    def computed(self, model: str, by_adapter: dict[str, int], at: float) -> None:
        """Take tokens that were computed by adapter, or for the model itself (:data:`BASE`)."""
        self._interval(model, at).tokens.update(by_adapter)

    def _interval(self, model: str, at: float) -> _Interval:
        return self._intervals.setdefault(model, _Interval(at))

    def _attribute(self, model: str, interval: _Interval) -> None:
        if not interval.joules:
            return
        total = interval.tokens.total()
        for adapter, tokens in (interval.tokens if total else Counter({IDLE: 0})).items():
            key = (model, adapter)
            if key not in self.joules and len(self.joules) >= MOST:
                key = (model, OTHERS)
            self.joules[key] += interval.joules * tokens / total if total else interval.joules
            self.tokens[key] += tokens
