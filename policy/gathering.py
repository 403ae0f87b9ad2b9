"""What gateways and replicas told, gathered into the signals that decisions read."""

from __future__ import annotations

from policy.reports import GatewayReport
from policy.signals import Signals
from policy.types import Beat


class Gathering:
    """All that was told to one controller since ``epoch``.

    Instants are seconds of the controller's own clock, which never goes back.
    """

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch

    def take(self, report: GatewayReport, at: float) -> None:
        """A gateway worker tells its totals."""

    def take_beat(self, beat: Beat, at: float) -> None:
        """A replica tells how it is."""

    def signals(self, model: str, at: float) -> Signals:
        """What is known of ``model``."""
        return Signals()
