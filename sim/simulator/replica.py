"""A simulated replica, and the tickets of the requests on it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from policy.admission.dispatcher import Dispatcher, DispatchTicket
from policy.request import Request
from policy.routing.cost import Candidate
from policy.routing.replica_health import CircuitBreaker
from policy.scaling.reconcile_steps import LayerKey
from policy.types import ReplicaPhase
from sim.arrivals import Arrival
from sim.simulator.engine import VirtualTimeEngine
from sim.simulator.run_record import ReplicaLifetime


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One replica: its span in the record, its engine, and the gateway's view of it.

    ``places`` are its requests, ``leave_by`` the end of its drain timeout, ``reported`` the version of its
    loaded adapters that a gateway last received. ``names`` are the hashes by which requests named the blocks
    of its prefix cache, and the tokens up to each.
    """

    key: LayerKey
    span: ReplicaLifetime
    engine: VirtualTimeEngine
    view: Candidate
    breaker: CircuitBreaker
    state: ReplicaPhase = ReplicaPhase.STARTING
    places: dict[int, SimulatedTicket] = field(default_factory=dict)
    reported: int = 0
    names: dict[Hashable, dict[int, tuple[int, tuple[Hashable, ...]]]] = field(default_factory=dict)
    leave_by: float = 0.0
    slow: float = 1.0
    # The number of the engine event in force; earlier ones are void.
    version: int = 0

    def begin(self, tokens: int) -> bool:
        view = self.view
        view.in_flight += 1
        view.pending_tokens += tokens
        view.begun += 1
        return False

    def first_token(self, tokens: int, at: float) -> None:
        """The prefill of such a request is over."""
        self.view.pending_tokens -= tokens
        self.view.turned_at = at

    def end(self) -> None:
        self.view.in_flight -= 1


class SimulatedTicket(DispatchTicket[SimulatedReplica]):
    """A ticket with its arrival in the trace, its last replica (``runner``) and its times.

    ``cached_tokens`` are those of its prompt found in the prefix cache.
    """

    __slots__ = ("arrival", "cached_tokens", "first_at", "number", "runner", "sent_at")

    def __init__(
        self, dispatcher: Dispatcher[SimulatedReplica], request: Request, number: int, arrival: Arrival
    ) -> None:
        super().__init__(dispatcher, request)
        self.number = number
        self.arrival = arrival
        self.runner: SimulatedReplica | None = None
        self.cached_tokens = 0
        self.sent_at: float | None = None
        self.first_at: float | None = None

    def gap_s(self, at: float) -> float:
        """The mean inter-token gap, with the last token ``at``; 0 for a single one."""
        gaps = self.arrival.output_tokens - 1
        return (at - self.first_at) / gaps if gaps and self.first_at is not None else 0.0
