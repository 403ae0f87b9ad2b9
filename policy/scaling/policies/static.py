"""A fixed replica count."""

from __future__ import annotations

from typing import Any

from policy.config.control import Count, Section
from policy.scaling.view import Proposal, View


class StaticParameters(Section, frozen=True):
    """The fixed count within the bounds of the mode; by default the current one."""

    replicas: Count | None = None


class Static:
    """Keeps count and mode, whatever the load."""

    def __init__(self, parameters: StaticParameters) -> None:
        self._replicas = parameters.replicas

    def decide(self, view: View, memory: Any) -> Proposal:
        """The same count, whatever the signals."""
        wanted = view.count if self._replicas is None else self._replicas
        count = max(view.least, min(wanted, view.most))
        reason = f"{wanted} as now" if self._replicas is None else f"{wanted} configured"
        if count != wanted:
            reason += f", {count} within the bounds of the mode"
        return Proposal(count=count, reason=reason, terms={"replicas": float(wanted)}, fixed=True)
