"""A scaling policy of one's own: so many replicas by day and by night, and more while requests wait.

    control:
      policy:
        custom: {class: "custom_policy:ByTheClock", day: 4, night: 1}

It is made once for each model, with what stands beside ``class`` as keyword arguments; one that does not fit
is refused by a ``ValueError``. What ``decide`` answers is checked like any policy's: budgets, steps and holds
are not its business.
"""

from __future__ import annotations

from typing import Any

from policy.scaling.view import Proposal, View


class ByTheClock:
    """``day`` replicas from ``opens`` to ``closes`` o'clock (UTC), else ``night``.

    And one more for each ``patience_s`` that requests wait on end.
    """

    def __init__(
        self, *, day: int, night: int = 1, opens: int = 8, closes: int = 20, patience_s: float = 30.0
    ) -> None:
        if not 0 <= night <= day:
            raise ValueError(f"night must be from 0 to day = {day}")
        if not 0 <= opens < closes <= 24:
            raise ValueError("opens must be before closes, both from 0 to 24 o'clock")
        if patience_s <= 0:
            raise ValueError("patience_s must be above 0")
        self._day, self._night = day, night
        self._opens, self._closes = opens, closes
        self._patience_s = patience_s

    def decide(self, view: View, memory: Any) -> Proposal:
        """A function of its arguments alone: the time is ``view.at``, what it must keep is ``memory``.

        Here that is since when requests wait: ``None``, or an instant.
        """
        hour = view.at % 86_400 // 3600
        count = self._day if self._opens <= hour < self._closes else self._night
        reason = f"{count} at {hour:.0f} o'clock"
        demand = view.signals.demand
        if demand is None or not demand.queued:
            return Proposal(count=count, reason=reason)
        since = memory if isinstance(memory, float) else view.at
        more = int((view.at - since) // self._patience_s)
        if more:
            reason += f", and {more} more for requests that wait since {view.at - since:.0f} s"
        return Proposal(
            count=count + more, reason=reason, terms={"clock": count, "queue": more}, memory=since
        )
