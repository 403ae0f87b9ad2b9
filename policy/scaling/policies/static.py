"""A fixed replica count."""

from __future__ import annotations

from typing import Any

from policy.config.control import Count, Section
from policy.scaling.view import Proposal, View


class Static(Section, frozen=True):
    """Keeps the mode, and ``replicas`` within its bounds; by default the current replica count."""

    replicas: Count | None = None

    def decide(self, view: View, memory: Any) -> Proposal:
        """The same count, whatever the signals."""
        wanted = view.count if self.replicas is None else self.replicas
        count = max(view.least, min(wanted, view.most))
        reason = f"{wanted} as now" if self.replicas is None else f"{wanted} configured"
        return Proposal(
            count=count,
            reason=reason,
            terms={"replicas": float(wanted)},
            fixed=True,
            unbounded=None if count == wanted else wanted,
        )
