"""A custom scaling policy: one replica count by day, another by night, and more while requests are queued.

    control:
      policy:
        custom: {class: "custom_policy:ByTheClock", day: 4, night: 1}

One instance is created per model. The other keys beside ``class`` are its keyword arguments; the constructor
rejects invalid ones with a ``ValueError``. Guardrails (budgets, step limits, ``hold_s``) come after it.
"""

from __future__ import annotations

from typing import Any

from policy.scaling.view import Proposal, View


class ByTheClock:
    """``day`` replicas from ``opens`` to ``closes`` o'clock (UTC), else ``night``.

    One replica is added for each ``patience_s`` seconds for which requests have been queued without a break.
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
        """A pure function: the time is ``view.at``, the state is ``memory``.

        The state is the time since which requests have been queued, or ``None``.
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
