"""Whether a worker should be sent requests."""

from __future__ import annotations

from gateway.control.document import FollowedDeployment
from gateway.intake.adapter_catalog import CatalogView
from gateway.routing.fleet import FleetView


class Readiness:
    """Whether one worker should be sent requests. ``draining`` once it accepts no more."""

    def __init__(self, document: FollowedDeployment, fleet: FleetView, catalog: CatalogView) -> None:
        self._document = document
        self._fleet = fleet
        self._catalog = catalog
        self.draining = False

    def why_not(self) -> list[str]:
        """The reasons why this worker cannot serve; empty when it is ready."""
        reasons = []
        if self.draining:
            reasons.append("draining")
        if not self._fleet.models:
            reasons.append("no model is known")
        if self._document.deployment.needs_controller and self._fleet.source == "none":
            reasons.append("the controller was not seen yet and no last fleet is on disk")
        elif self._catalog.wanted and not self._catalog.known:
            reasons.append("the controller has not sent the adapter catalog yet")
        return reasons
