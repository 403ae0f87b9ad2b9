"""Counts of decisions, and the regret of their forecasts."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

from policy.scaling.decision_types import Decision, Situation

# Forecasts of one model that wait for their instant.
MAX_WAITING = 1000


class DecisionCounts:
    """All decisions since the start of the controller.

    ``decisions`` by model, change and guardrail; ``forecasts`` that came due by model, and ``errors`` by
    model and sign: by how many requests per second they were above or below the rate that came, in sum.
    """

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        self.forecasts: Counter[str] = Counter()
        self.errors: dict[tuple[str, str], float] = {}
        # A heap by model: when the forecast is for, and its rate. A later forecast may be for an earlier
        # instant, as the start time changes.
        self._waiting: dict[str, list[tuple[float, float]]] = {}

    def take(self, decisions: Mapping[str, Decision], situations: Mapping[str, Situation]) -> None:
        """Count the decisions of one round."""
        for name, decision in decisions.items():
            rule = str(decision.applied_guardrails[-1].rule) if decision.applied_guardrails else "policy"
            self.decisions[name, _change(decision), rule] += 1
            self._judge(decision, situations[name])

    def forget(self, model: str) -> None:
        """Forget the forecasts of a model that was removed; its counts stay."""
        self._waiting.pop(model, None)

    def _judge(self, decision: Decision, situation: Situation) -> None:
        """Compare the forecasts that were for now with the rate that came; add the new one."""
        waiting = self._waiting.setdefault(decision.model, [])
        demand = situation.signals.demand
        while waiting and waiting[0][0] <= decision.at:
            due_at, forecast = heapq.heappop(waiting)
            # Nothing is known of a time without decisions.
            if demand is not None and decision.at - due_at <= situation.tick_s + situation.guard.stale_s:
                error = forecast - demand.arrivals.last_6_s
                key = decision.model, "above" if error > 0 else "below"
                self.forecasts[decision.model] += 1
                self.errors[key] = self.errors.get(key, 0.0) + abs(error)
        if (expected := decision.proposal.forecast) is not None and len(waiting) < MAX_WAITING:
            lead_s = next(option.lead_s for option in situation.mode_options if option.mode == situation.mode)
            heapq.heappush(waiting, (decision.at + lead_s, expected))


def _change(decision: Decision) -> str:
    if decision.mode != decision.was_mode:
        return "mode"
    if decision.count == decision.was_count:
        return "none"
    return "up" if decision.count > decision.was_count else "down"
