"""The state of one replica in the router: its speed, cache contents and share of the traffic."""

from __future__ import annotations

from typing import Final

from policy.engine.performance_model import Timing
from policy.engine.prefill_estimate import StepTable, step_table_of
from policy.request import ASSUMED_OUTPUT_TOKENS, Request
from policy.routing.cache_affinity import AssumedAdapterSlots, ReplicaShare
from policy.routing.cached_prefixes import PrefixIndex
from policy.routing.prediction_correction import PredictionError
from policy.routing.resident_sessions import ResidentSessions

# Loading a LoRA adapter of rank 16 from a local disk; measured once one was loaded.
ASSUMED_LOAD_S: Final = 0.25


class ReplicaState:
    """One replica: its speed, what it holds, its share of the traffic, and the errors of its predictions.

    ``load_s`` is the load time of an adapter there in seconds, ``loads`` the predicted ends of the loads in
    progress. ``seen_at`` is when it was last a candidate. Computed when the counts change: the ``running``
    requests and ``kv_tokens``, their ``step_s``, the wait ``still_s`` where no prompt is pending, the seconds
    ``ahead_s`` of the pending prompts, ``first_s`` of their first step and ``rest_s`` of the ``rest`` of
    their tokens, and the seconds ``seat_s`` to a free sequence.
    """

    def __init__(self, key: int, timing: Timing | None, assumed: Timing, slots: int) -> None:
        self.key = key
        self.held = PrefixIndex()
        self.sessions = ResidentSessions()
        self.slots = AssumedAdapterSlots(slots)
        self.share = ReplicaShare()
        self.time(timing, assumed)
        self.residual = PredictionError()
        self.load_s = ASSUMED_LOAD_S
        self.loads: list[float] = []
        self.seen_at = 0.0

    def time(self, timing: Timing | None, assumed: Timing) -> None:
        """Set the reported timing; missing parts come from ``assumed``."""
        self.timing = timing
        self.pace: StepTable = step_table_of(timing, assumed)
        self.in_flight = -1
        self.pending = 0
        self.kv_used = 0.0
        self.share.weight = self.pace.capacity
        if self.pace.kv_tokens:
            self.held.capacity = float(self.pace.kv_tokens)

    def cached(self, request: Request, depth: int) -> int:
        """The tokens of the prompt that are cached there, with ``depth`` of its hashes.

        As its engine reports, or else by their estimated depth. A prompt is hashed at few depths. That of a
        known session begins with its last one, as far as shown.
        """
        if not depth:
            return 0
        tokens = self.held.tokens.get(request.prefix[depth - 1], -1)
        if tokens >= 0:
            return tokens
        tokens = request.depths[depth - 1]
        if request.session and (resident := self.sessions.by_session.get(request.session)) is not None:
            known = resident.tokens
            if known > tokens and (depth == len(request.depths) or known < request.depths[depth]):
                return known
        return tokens

    def loss_s(self, request: Request, replicas: int, at: float) -> float:
        """Seconds of prefill that the session of ``request`` is expected to lose if it does not go here now.

        These are of the tokens that no other session has here. They are lost if it goes to another one of
        ``replicas``, each as likely, or else if they are evicted first: the less recent, the likelier.
        """
        resident = self.sessions.by_session.get(request.session)
        if resident is None or resident.away or not (depth := self.held.depth(request.prefix, at)):
            return 0.0
        stays = 1.0 - self.held.age(request.prefix[depth - 1]) / self.held.capacity
        lost = 1.0 - max(0.0, stays) / replicas
        return lost * self.pace.prefill_s(min(resident.own, self.cached(request, depth)), 0.0, 0)

    def loading(self, at: float) -> None:
        """An adapter load starts, after those before it; between two loads requests run for as long."""
        self.loads.append(at + self.ahead_s + self.load_s * (2 * len(self.loads) + 1))

    def loaded(self) -> None:
        """The first load has ended."""
        if self.loads:
            del self.loads[0]

    def loads_s(self, at: float, turned_at: float) -> float:
        """Seconds until all current loads have ended; the first started at ``turned_at``."""
        loads = self.loads
        while loads and loads[0] < at:
            del loads[0]
        if not loads:
            return 0.0
        since, most = max(0.0, at - turned_at), 0.9 * self.load_s
        return (2 * len(loads) - 1) * self.load_s - (since if since < most else most)

    def count(self, in_flight: int, pending: int, kv_used: float) -> None:
        """Set the requests, their uncached prompt tokens, and the fraction of KV in use."""
        self.in_flight, self.pending, self.kv_used = in_flight, pending, kv_used
        pace = self.pace
        self.running = running = in_flight if in_flight < pace.seats else pace.seats
        self.kv_tokens = kv = kv_used * pace.kv_tokens
        self.step_s = step = pace.step_s(running, kv, running)
        self.ahead_s = self.first_s = self.rest_s = self.seat_s = 0.0
        self.rest = 0
        if pending > 0:
            first = min(pending, max(pace.batch - running, 1))
            self.rest = pending - first
            self.first_s = self.ahead_s = pace.prefill_s(first, kv, running)
            if self.rest:
                self.rest_s = pace.prefill_s(self.rest, kv, running)
                self.ahead_s = pace.prefill_s(pending, kv, running)
        if in_flight >= pace.seats:  # a sequence is free when one request has ended
            self.seat_s = (in_flight + 1 - pace.seats) * ASSUMED_OUTPUT_TOKENS / pace.seats * step
        # A new request waits for half of the current step on average.
        self.still_s = 0.5 * step + self.seat_s if in_flight else 0.0
