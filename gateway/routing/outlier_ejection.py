"""Eject replicas that make no progress, probe those out of rotation, and reopen those of a lost controller.

A replica of ours is probed with a canary, a request of one token. An external server is probed with one
client request, which may be retried, once it lists its models again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from gateway.http.http1_client import is_local_fault
from gateway.http.internal_client import internal_client
from gateway.routing.fleet import SNAPSHOT_STALE_S, FleetView, ServedModel
from gateway.routing.replica_handle import STALE_S, ReplicaHandle
from gateway.telemetry.metrics import WorkerMetrics
from policy.config.deployment import Deployment
from policy.errors import Refusal
from policy.routing.replica_health import AttemptResult, CircuitBreakerState
from policy.types import EngineKind
from policy.wire.canary_request import CANARIES
from policy.wire.headers import REFUSAL_HEADER

if TYPE_CHECKING:
    from gateway.delivery.relay import Relay

SWEEP_S = 0.25
# A sweep that begins so late finds that this worker was stopped, or starved: what came meanwhile is unread.
PAUSED_S = 1.0
# A stream of which nothing comes for this time, while its engine steps, has stalled.
STALL_S = 2.0
# A probe without a result is repeated after this, as is one to a replica whose load stream hangs.
AGAIN_S = 1.0
# So many requests of a replica without progress are moved in one turn of the event loop.
MOST_MOVED = 64


@dataclass(eq=False)
class ReplicaProber:
    """The periodic sweep over all replicas of this worker, and the probes that it starts."""

    fleet: FleetView
    metrics: WorkerMetrics
    deployment: Callable[[], Deployment]
    secret: str

    def __post_init__(self) -> None:
        self._running: dict[ReplicaHandle, asyncio.Task[None]] = {}
        # Those to move, with the time for which their replica made no progress.
        self._silent: deque[tuple[Relay, float]] = deque()
        self._clock = asyncio.get_running_loop().time
        # Since when this worker runs without a pause.
        self._runs_since = self._clock()

    async def run(self) -> None:
        async with internal_client(self.secret) as client:
            try:
                while True:
                    due = self._clock() + SWEEP_S
                    await asyncio.sleep(SWEEP_S)
                    at = self._clock()
                    if at - due > PAUSED_S:
                        self._runs_since = at
                    self._sweep(client, at)
                    while self._silent:
                        self._move()
                        await asyncio.sleep(0)
            finally:
                for task in self._running.values():
                    task.cancel()

    def _sweep(self, client: httpx.AsyncClient, at: float) -> None:
        timeout_s = self.deployment().gateway.progress_timeout_s
        for served in self.fleet.models:
            self._eject_stuck(served, at, timeout_s)
            self._move_from_leaving(served, at, timeout_s)
            self._reopen(served, at)
            meter = self.metrics.model(served.name)
            for handle in served.handles:
                if stalls := new_stalls(handle):
                    meter.stalls[handle.id] += stalls
                if served.engine is EngineKind.EXTERNAL:
                    if handle.answering and handle.breaker.due(at):
                        handle.breaker.half_open()
                        self.fleet.replica_changed(served)
                elif handle.probe_at <= at and handle not in self._running:
                    self._consider(client, served, handle, at, timeout_s)
            states = Counter(handle.breaker.state for handle in served.handles)
            for state in CircuitBreakerState:
                meter.breakers[state] = states[state]
            if served.is_unavailable(at):
                self.fleet.unavailable(served)

    def _eject_stuck(self, served: ServedModel, at: float, timeout_s: float) -> None:
        """Eject those that hold requests and make no progress; requests without any answer are moved.

        The time before a pause of this worker's own counts for none: nobody was heard in it.
        """
        stuck = []
        heard_s = at - self._runs_since
        for handle in served.handles:
            handle.age(at)
            # Silence on all of its connections is a partition, or a process that is stopped.
            patience_s = min(STALE_S, timeout_s) if handle.stale(at) else timeout_s
            stuck_s = min(handle.stuck_s(at), heard_s)
            handle.breaker.doubted = stuck_s >= 0.5 * patience_s
            if stuck_s >= patience_s:
                stuck.append(handle)
        # All are ejected before the first request moves: it must not go from one to the next.
        ejected = [handle for handle in stuck if served.health.stalled(handle.breaker, at)]
        for handle in stuck:
            others = any(other.admissible for other in served.handles)
            if handle in ejected or (others and not handle.admissible):
                stuck_s = handle.stuck_s(at)
                self._silent.extend((relay, stuck_s) for relay in handle.relays if not relay.committed)
        if ejected:
            self.fleet.replica_changed(served)

    def _reopen(self, served: ServedModel, at: float) -> None:
        """Keep replicas open that a controller was about to close when it was lost.

        It renews the instant at which they close while it waits for their requests, and then starts others.
        """
        if served.closes_at < math.inf and at > served.snapshot_at + SNAPSHOT_STALE_S:
            served.closing_since = served.closes_at = math.inf
            self.fleet.replica_changed(served)

    def _move_from_leaving(self, served: ServedModel, at: float, timeout_s: float) -> None:
        """Move streams that have not begun from replicas that left the fleet and make no progress.

        Of answers that are no streams nothing shows it there.
        """
        served.leaving = [handle for handle in served.leaving if handle.relays]
        others = any(handle.admissible for handle in served.handles)
        for handle in served.leaving:
            stuck_s = min(handle.stuck_s(at), at - self._runs_since)
            if others and stuck_s >= timeout_s:
                waiting = (each for each in handle.relays if each.streams and not each.committed)
                self._silent.extend((relay, stuck_s) for relay in waiting)

    def _move(self) -> None:
        """Have the next few requests end their attempts, unless an answer has begun meanwhile."""
        for _ in range(min(MOST_MOVED, len(self._silent))):
            relay, stuck_s = self._silent.popleft()
            if not relay.committed:
                relay.expire(stuck_s)

    def _consider(
        self,
        client: httpx.AsyncClient,
        served: ServedModel,
        handle: ReplicaHandle,
        at: float,
        timeout_s: float,
    ) -> None:
        """Send ``handle`` a canary if it is due one."""
        breaker = handle.breaker
        if breaker.due(at) and handle.answering:
            breaker.half_open()
        if breaker.state is CircuitBreakerState.HALF_OPEN:
            if not breaker.take_probe():
                return
        elif handle.answering or not handle.silent:
            return

        async def probe() -> None:
            result = AttemptResult.NOTHING
            try:
                result = await self._send_canary(client, served, handle, timeout_s)
            finally:
                handle.probe_at = self._clock() + AGAIN_S
                del self._running[handle]
                self._record(served, handle, result)

        self._running[handle] = asyncio.create_task(probe())

    def _record(self, served: ServedModel, handle: ReplicaHandle, result: AttemptResult) -> None:
        at = self._clock()
        back = served.health.probed(handle.breaker, result, at)
        # Its load stream hangs, but it works: only requests counted here are known.
        if result is AttemptResult.GOOD and handle.silent:
            handle.set_answering(at, True)
        if back:
            self.fleet.replica_changed(served)

    async def _send_canary(
        self, client: httpx.AsyncClient, served: ServedModel, handle: ReplicaHandle, timeout_s: float
    ) -> AttemptResult:
        """Send the canary: good if answered, no result if the replica is only full or starting."""
        for path, body in CANARIES[served.runner]:
            try:
                answer = await client.post(
                    handle.url + path, json={"model": handle.model, **body}, timeout=timeout_s
                )
            except httpx.HTTPError as error:
                return AttemptResult.NOTHING if is_local_fault(error) else AttemptResult.BAD
            if answer.status_code == httpx.codes.OK:
                return AttemptResult.GOOD
            if answer.headers.get(REFUSAL_HEADER, Refusal.REPLICA_LOST) != Refusal.REPLICA_LOST:
                return AttemptResult.NOTHING
        return AttemptResult.BAD


def new_stalls(handle: ReplicaHandle) -> int:
    """The streams of this worker that have stalled there since the last call.

    An engine serves each of its streams in every step, unless it preempted the request. Streams whose clients
    do not read are exempt.
    """
    found = 0
    for relay in handle.relays:
        silent_from = relay.quiet_since
        stalled = handle.stepped_after - silent_from >= STALL_S and relay.begun and not relay.held_back
        if stalled and relay.stall_from != silent_from:
            relay.stall_from = silent_from
            found += 1
    return found
