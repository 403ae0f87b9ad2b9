"""What a queue says to those that it does not serve, and the count of them."""

from __future__ import annotations

from gateway.protocol.errors import Refused
from gateway.queue.model_queue import Ticket
from gateway.routing.fleet import ServedModel
from gateway.telemetry.queue_metrics import QueueMetrics
from policy.errors import Refusal

# By then a replica that failed to load an adapter has been asked for it again.
ADAPTER_RETRY_S = 5


def no_replica(model: str, retry_after_s: float | None = None) -> Refused:
    """No replica of ``model`` serves, and to wait for one would be in vain."""
    return Refused(
        Refusal.NO_REPLICA, f"No replica of {model} serves at present.", retry_after_s=retry_after_s
    )


def adapter_not_loadable(served: ServedModel, adapter: str) -> Refused:
    """No replica of ``served`` that is up could load ``adapter`` lately; a retry may find one."""
    cause = served.causes.get(adapter)
    return Refused(
        Refusal.ADAPTER_FAILED,
        f"No replica of {served.name} could load the adapter '{adapter}'{f' ({cause})' if cause else ''}.",
        param="model",
        status=503,
        retry_after_s=ADAPTER_RETRY_S,
    )


class Rejections:
    """The refusals of all queues of this worker."""

    def __init__(self, meters: QueueMetrics) -> None:
        self._meters = meters

    def newcomer(self, place: Ticket, reason: Refusal, retry_after_s: int) -> Refused:
        """It may not wait."""
        name, waiting = place.served.name, len(place.line.queue)
        self._meters.model(name).refused[reason] += 1
        if reason is Refusal.OVERLOADED:
            text = f"{waiting} requests wait for {name}: this one would not be served before its deadline."
        else:
            text = f"{waiting} requests already wait for {name}."
        return Refused(reason, text, retry_after_s=retry_after_s)

    def displace(self, place: Ticket, retry_after_s: int) -> None:
        """It waited, and had to make room for another."""
        name = place.served.name
        self._meters.model(name).displaced += 1
        assert place.granted is not None
        if not place.granted.done():
            text = f"The queue for {name} is full, and this request made room for another."
            place.granted.set_exception(Refused(Refusal.QUEUE_FULL, text, retry_after_s=retry_after_s))

    def in_vain(self, place: Ticket) -> None:
        """It waits for a replica, and none is on its way."""
        name = place.served.name
        if place.granted is not None and not place.granted.done():
            self._meters.model(name).refused[Refusal.NO_REPLICA] += 1
            place.granted.set_exception(no_replica(name))

    def cannot_load(self, place: Ticket) -> None:
        """It waits for a replica, and those that are up cannot load its adapter."""
        name = place.served.name
        if place.granted is not None and not place.granted.done():
            self._meters.model(name).refused[Refusal.ADAPTER_FAILED] += 1
            place.granted.set_exception(adapter_not_loadable(place.served, place.request.adapter))

    def expired(self, place: Ticket) -> Refused:
        """Its deadline passed while it waited."""
        name = place.served.name
        up = any(link.admissible for link in place.served.links)
        reason = Refusal.DEADLINE if up else Refusal.NO_REPLICA
        self._meters.model(name).refused[reason] += 1
        was = "had room" if up else "was ready"
        return Refused(reason, f"No replica of {name} {was} before the request's deadline.")
