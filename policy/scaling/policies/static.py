"""As many as there are, or as were named."""

from __future__ import annotations

from typing import Any

from policy.config.control import Count, Section
from policy.scaling.view import Proposal, View


class StaticParameters(Section, frozen=True):
    """``replicas`` there shall be, within the bounds of the mode; those that there are if not given."""

    replicas: Count | None = None


class Static:
    """Changes nothing by load, and has the mode not change by it."""

    def __init__(self, parameters: StaticParameters) -> None:
        self._replicas = parameters.replicas

    def decide(self, view: View, memory: Any) -> Proposal:
        """The same count whatever is measured; so it needs no figures either."""
        wanted = view.count if self._replicas is None else self._replicas
        count = max(view.least, min(wanted, view.most))
        reason = f"{wanted} as now" if self._replicas is None else f"{wanted} configured"
        if count != wanted:
            reason += f", {count} within the bounds of the mode"
        return Proposal(count=count, reason=reason, terms={"replicas": float(wanted)}, fixed=True)
