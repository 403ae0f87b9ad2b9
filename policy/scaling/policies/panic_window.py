"""Concurrency per replica over a stable and a panic window, as in Knative.

After ``pkg/autoscaler/scaling/autoscaler.go`` of knative/serving, with windows of 60 and 6 seconds. A panic
lasts until a stable window has passed without cause; meanwhile there is no scale-down.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from policy.config.control import Section
from policy.scaling.policies.rounding import decode_state, encode_state, is_usable, per_replica, whole
from policy.scaling.view import Proposal, View

STABLE_S = 60.0


class PanicWindowState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A current panic: its last cause, and the largest count so far."""

    panic_at: float
    most: int


class PanicWindow(Section, frozen=True):
    """The policy; its memory is the current panic.

    The target is ``utilisation`` of the ``concurrency`` per replica. A panic begins when the panic window
    needs ``panic`` times the ready replicas. One decision multiplies them by at most ``up``, and divides them
    by at most ``down``.
    """

    concurrency: Annotated[float, Meta(gt=0, le=1e6)] = 16.0
    utilisation: Annotated[float, Meta(gt=0, le=1)] = 0.7
    panic: Annotated[float, Meta(gt=1, le=10)] = 2.0
    up: Annotated[float, Meta(gt=1, le=1e6)] = 1000.0
    down: Annotated[float, Meta(gt=1, le=1e6)] = 2.0

    def decide(self, view: View, memory: Any) -> Proposal:
        """The count for the target concurrency; in a panic no scale-down."""
        target = self.concurrency * self.utilisation
        demand = view.signals.demand
        panic = decode_state(memory, PanicWindowState)
        if demand is None:
            return view.hold(encode_state(panic), "no gateway has reported")
        ready = max(1, view.supply.serving)
        stable = per_replica(is_usable(demand.concurrency.last_60_s), target)
        short = per_replica(is_usable(demand.concurrency.last_6_s), target)
        terms = {"stable": stable, "panic": short}
        over = whole(short) / ready >= self.panic
        if over:
            panic = PanicWindowState(view.at, panic.most if panic else 0)
        elif panic is not None and view.at > panic.panic_at + STABLE_S:
            panic = None
        if panic is None:
            count = self._paced(stable, ready)
            said = f"{demand.concurrency.last_60_s:.4g} concurrent requests over 60 s"
            return Proposal(
                count=view.within(count),
                reason=f"{said}, target {target:.4g} per replica",
                terms=terms,
                unbounded=view.unbounded(count),
            )
        wanted = max(self._paced(stable, ready), self._paced(short, ready), view.count)
        if wanted > panic.most:
            panic = PanicWindowState(view.at, wanted)
        said = f"panic: {demand.concurrency.last_6_s:.4g} concurrent requests over 6 s"
        return Proposal(
            count=view.within(panic.most),
            reason=f"{said}, target {target:.4g} for each of {ready} ready replicas",
            terms=terms,
            memory=encode_state(panic),
            unbounded=view.unbounded(panic.most),
        )

    def _paced(self, wanted: float, ready: int) -> int:
        """``wanted`` within the step limits of one decision."""
        fewest = int(ready / self.down)
        most = whole(self.up * ready)
        return min(max(whole(wanted), fewest), most)
