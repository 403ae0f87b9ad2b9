"""The times of each model's decisions: multiples of its tick, or at once after something urgent."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from policy.config.deployment import ResourceBudget

# The signals of a controller that has just started are incomplete, and would look like an idle fleet.
LISTEN_S = 5.0
# A tick that is a sum of fractions may end a moment before the multiple that it means.
_ROUNDING = 1e-9


class DecisionSchedule:
    """Remembers the last tick of each model; instants are seconds of any clock that never goes back."""

    def __init__(self, started_at: float) -> None:
        self._listen_until = started_at + LISTEN_S
        self._ticks: dict[str, int] = {}

    def due(
        self,
        ticks_s: Mapping[str, float],
        at: float,
        budget: ResourceBudget,
        *,
        changed: Collection[str] = (),
        urgent: Collection[str] = (),
    ) -> set[str]:
        """The models to decide on at ``at``, of those in ``ticks_s`` (the tick of each in seconds).

        ``changed`` models do not wait for their tick, ``urgent`` ones also not for signals. All models that
        share a budget are decided on together: one after the other, each would take what another has just
        given up for a third.
        """
        found = {model for model in urgent if model in ticks_s}
        for model, tick_s in ticks_s.items() if at >= self._listen_until else ():
            tick = math.floor(at / tick_s + _ROUNDING)
            if model in changed or self._ticks.get(model) != tick:
                self._ticks[model] = tick
                found.add(model)
        if len(self._ticks) > len(ticks_s):
            self._ticks = {model: tick for model, tick in self._ticks.items() if model in ticks_s}
        return set(ticks_s) if found and _is_shared(budget) else found


def _is_shared(budget: ResourceBudget) -> bool:
    bounds = (budget.gpus, budget.cpus, budget.watts, budget.cost_per_h)
    return any(bound is not None for bound in bounds)
