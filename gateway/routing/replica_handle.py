"""One replica as this worker knows it: its connections, its load and its standing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Set
from math import inf
from time import monotonic, time
from typing import TYPE_CHECKING, Final

from gateway.http.frame_client import FrameChannel
from gateway.http.http1_client import ConnectionPool, UpstreamConnection
from gateway.http.ndjson_client import NdjsonStream
from gateway.routing.external_server_options import ServerAccess
from gateway.routing.fleet_listeners import NO_EVENTS, FleetListeners
from gateway.routing.loaded_adapters import ReplicaAdapters
from gateway.routing.shared_counters import LOCAL, SharedCounts
from gateway.routing.tcp_liveness_check import TcpLivenessCheck
from policy.errors import Refusal
from policy.hashing import hash_name
from policy.routing.concurrency_limit import ConcurrencyLimit, ServerQueue
from policy.routing.cost import Candidate
from policy.routing.replica_health import CircuitBreakerState, HealthCounters, ReplicaHealth, ReplicaWatchdog
from policy.types import Replica, ReplicaPhase
from policy.wire.headers import ENGINE_TIME_HEADER, SECRET_HEADER
from policy.wire.load_stream import LOAD_LINE

if TYPE_CHECKING:
    from gateway.delivery.relay import Relay
    from gateway.routing.engine_cache.external_server_cache import ServerCache
    from gateway.routing.engine_cache.external_server_caches import ServerCaches

# Compared for each request: machine code reads a constant faster than a member of an enumeration.
_CLOSED: Final = CircuitBreakerState.CLOSED
_HALF_OPEN: Final = CircuitBreakerState.HALF_OPEN
# In these phases it may end without a fault.
_LEAVING: Final = frozenset({ReplicaPhase.DRAINING, ReplicaPhase.ASLEEP})
# A load stream that sends nothing for this time, three lines, is stale.
STALE_S: Final = 3.0


class UnobservedPrefill:
    """A prefill whose end is not seen: ``tokens`` are assumed computed at ``at`` (loop time), 0 after it."""

    def __init__(self, tokens: int, at: float) -> None:
        self.tokens = tokens
        self.at = at


class ReplicaHandle:
    """One replica as seen from one worker: its connections, its reported load and what was sent since.

    ``label`` names it to clients. ``answering`` is whether the replica can be reached, ``open`` whether it
    reports that it takes requests, ``full`` whether it refused one for lack of room; all follow its load
    stream, or a probe where there is none (external). The results of attempts move ``breaker``, through
    ``health``. ``relays`` are the attempts of this worker that run there. ``adapters`` are its adapters,
    ``their_model`` is its name for the model if that is not ours. ``silent`` is whether its load stream
    hangs, ``lost_at`` since when it is not answering, ``probe_at`` when it may be probed again; instants are
    loop time. ``contradicting_answers`` counts those whose token counts were impossible for their requests.
    ``round_trip_s``: of the network, 0 if unknown. ``stepped_after``: when its engine's last step was yet to
    come. ``limit`` learns a bound that is not configured, ``cache`` follows an external server's KV events.
    ``liveness`` checks whether it is alive after a connection was lost.
    """

    def __init__(
        self,
        replica: Replica,
        connect_timeout_s: float,
        secret: str | None,
        shared: SharedCounts = LOCAL,
        health: ReplicaHealth | None = None,
        *,
        events: FleetListeners = NO_EVENTS,
    ) -> None:
        self.id = replica.id
        self.label = replica.id.encode()
        self.model = replica.model
        self.url = replica.url
        self.replica = replica
        self.pool = ConnectionPool(replica.url, connect_timeout_s)
        self._frames: FrameChannel | None = None
        self.constant_head = self._fixed_head
        if secret is not None:
            self.constant_head += f"{SECRET_HEADER}: {secret}\r\n{ENGINE_TIME_HEADER}: 1\r\n".encode()
        self.their_model = ""
        # Tidegate's replicas report their adapters themselves.
        self.adapters = ReplicaAdapters(replica.adapters if secret is None else (), loads=secret is not None)
        self.health = health or ReplicaHealth(HealthCounters(), lambda: 0.5)
        self.breaker = self.health.join()
        self.relays: set[Relay] = set()
        self.answering = False
        self.open = True
        self.full = False
        self.silent = False
        self.reported_at: float | None = None
        self.stepped_after = 0.0
        self.lost_at: float | None = None
        self.probe_at = 0.0
        self.contradicting_answers = 0
        self.round_trip_s = 0.0
        self.limit: ConcurrencyLimit | None = None
        self.liveness = TcpLivenessCheck(self.pool)
        self._death_check: asyncio.Task[None] | None = None
        self.view = Candidate(replica.id, hash_name(replica.id), bound=replica.load.bound)
        self.mine = 0
        self._events = events
        self._pending = self._begun = 0
        self._in_flight_of_other_hosts = self._pending_of_other_hosts = self._reported_pending = 0
        self._unobserved: deque[UnobservedPrefill] = deque()
        self.cache: ServerCache | None = None
        self.due_at = inf
        self.lone = False
        self._tokens = 0
        self._restarted = self._leaving = False
        self._shared = shared
        self._watchdog = ReplicaWatchdog()
        self._feed: NdjsonStream | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def _fixed_head(self) -> bytes:
        return b"host: " + self.pool.host_header + b"\r\ncontent-type: application/json\r\n"

    def ask_by(self, access: ServerAccess, caches: ServerCaches | None = None) -> None:
        """Send requests to this external server as ``access`` says; ``caches`` follows its events."""
        self.their_model = access.model
        self.pool.trust(access.ca_file, access.ca_changed_ns)
        self.constant_head = self._fixed_head
        if access.key:
            self.constant_head += b"authorization: Bearer %b\r\n" % access.key
        if caches is not None:
            self.cache = caches.of(self.cache, self.replica, self.view.key, access, self.constant_head)
        if access.max_in_flight is not None:
            self.limit = None
            self.view.bound = access.max_in_flight
        elif self.limit is None:
            self.limit = ConcurrencyLimit(time())
            self.view.bound = self.limit.limit

    def learn_bound(self, queue: ServerQueue | None) -> None:
        """Follow the queue that this external server reports; without a report, its answers' delays."""
        limit = self.limit
        if limit is None:
            return
        if queue is not None:
            limit.follow(queue, self.in_flight, time())
        else:
            begun = [relay.begun for relay in self.relays if relay.streams]
            if self.mine and 2 * len(begun) >= self.mine:
                limit.estimate(begun.count(False), len(begun), self.in_flight, time())
            else:
                limit.estimate_whole(self.mine, self.in_flight, time())
        self.view.bound = limit.limit

    def take_connection(self) -> UpstreamConnection | None:
        """A way for a request that needs no waiting, if there is one."""
        stream = None if self._frames is None else self._frames.take()
        return self.pool.take() if stream is None else stream

    @property
    def reads(self) -> int:
        """How often something came from the replica for a request."""
        return self.pool.reads + (0 if self._frames is None else self._frames.progress)

    def measure_round_trip(self) -> None:
        """Read the network's round trip off a connection; where there is none, the last one stays."""
        measured = 0.0 if self._frames is None else self._frames.round_trip_s()
        self.round_trip_s = measured or self.pool.round_trip_s() or self.round_trip_s

    @property
    def admissible(self) -> bool:
        """Whether a request may be sent now, its bound aside."""
        return (
            self.answering
            and self.open
            and not self.full
            and self.replica.state is ReplicaPhase.READY
            and (self.breaker.state is _CLOSED or self.health.admits(self.breaker))
        )

    @property
    def in_flight(self) -> int:
        """Requests of this host's workers, and those of other hosts by the replica's last report."""
        return self._in_flight_of_other_hosts + self.mine + self._shared.others(self.view.key)[0]

    def look(self) -> Candidate:
        """The current view with other workers' requests; while ``lone`` it holds until ``due_at``."""
        while self._unobserved and self._unobserved[0].at <= monotonic():
            self.end_prefill(self._unobserved[0])
        view = self.view
        self.lone = self._shared.alone
        in_flight, pending, begun = self._shared.others(view.key)
        view.in_flight = self._in_flight_of_other_hosts + self.mine + in_flight
        view.pending_tokens = self._pending_of_other_hosts + self._pending + pending
        view.begun = self._begun + begun
        return view

    def begin(self, tokens: int = 0) -> bool:
        """Take a slot for ``tokens`` uncached prompt tokens; returns whether it is a half-open probe."""
        self.mine += 1
        view = self.view
        view.in_flight += 1
        view.pending_tokens += tokens
        view.begun += 1
        self._pending += tokens
        self._begun += 1
        self._shared.begin(self.view.key, tokens)
        return self.breaker.state is _HALF_OPEN and self.breaker.take_probe()

    def first_token(self, tokens: int, at: float) -> None:
        """The prefill of such a request is over: its first token came, or it ended without one."""
        self._pending -= tokens
        self.view.pending_tokens -= tokens
        self.view.turned_at = at
        self._shared.first_token(self.view.key, tokens)

    def expect_prefill_end(self, tokens: int, at: float) -> UnobservedPrefill:
        """Assume that the prefill of a request without a visible first token is over at ``at``."""
        prefill = UnobservedPrefill(tokens, at)
        self._unobserved.append(prefill)
        self.due_at = self._unobserved[0].at
        return prefill

    def end_prefill(self, prefill: UnobservedPrefill) -> None:
        """Such a prefill is over: its time has come, or its request has ended."""
        if prefill.tokens:
            self.first_token(prefill.tokens, monotonic())
            prefill.tokens = 0
        unobserved = self._unobserved
        while unobserved and not unobserved[0].tokens:
            unobserved.popleft()
        self.due_at = unobserved[0].at if unobserved else inf

    def end(self) -> None:
        """A request of this worker ended there."""
        self.mine -= 1
        self.view.in_flight -= 1
        self._shared.end(self.view.key)

    def count(self, line: bytes, at: float) -> None:
        """Take a line of the replica's load stream; ``at`` is loop time.

        It only adds the requests of other hosts to those counted here; impossible counts are ignored.
        """
        report = LOAD_LINE.decode(line)
        load = report.load
        in_flight, pending, _ = self._shared.others(self.view.key)
        bound = max(0, load.bound)
        believed = load.in_flight if not bound or load.in_flight <= 2 * bound else 0
        self._in_flight_of_other_hosts = max(0, believed - self.mine - in_flight)
        if load.pending_tokens < self._reported_pending:  # a request had its first token there
            self.view.turned_at = at
        self._reported_pending = load.pending_tokens
        self._pending_of_other_hosts = max(0, load.pending_tokens - self._pending - pending)
        self.view.bound = bound
        self.view.kv_used = load.kv_used if 0.0 <= load.kv_used <= 1.0 else 0.0
        self.view.timing = report.timing or self.view.timing
        if self._restarted:
            self._restarted = False
            if load.tokens < self._tokens:  # it counts from its start
                self.renewed(at)
        if load.tokens > self._tokens and self.reported_at is not None:
            self.stepped_after = self.reported_at
        self._tokens = load.tokens
        if self.adapters.update(report.adapters, report.refused):
            self._adapters_changed(self.adapters.refusing)
        self.open = report.state is ReplicaPhase.READY
        self._leaving = report.state in _LEAVING
        self.full = False
        self.silent = False
        self.reported_at = at
        self.set_answering(at, True)
        self.look()
        if report.prefixes or report.held or report.gone or report.reset:
            self._events.prefixes(self.model, self.view.key, report)

    def become(self, replica: Replica, at: float) -> None:
        was, self.replica = self.replica, replica
        if (was.incarnation, was.pid) != (replica.incarnation, replica.pid):
            self.renewed(at)
        self._reach()
        if self._feed is not None:
            self._feed.retry_now()

    def renewed(self, at: float) -> None:
        """Its process was replaced: cache and failures are forgotten."""
        self.breaker.renew(at)
        self.adapters.forget()
        self._events.forgotten(self.model, self.view.key)

    def set_answering(self, at: float, answering: bool) -> None:
        """Record whether the replica is reachable."""
        if answering != self.answering:
            self.answering = answering
            if answering:
                self.breaker.reconnected()
            else:
                self.lost_at = at
                self.health.disconnected(self.breaker, at)
        self._reach()

    def died(self) -> None:
        """It ended without having drained."""
        self._events.died(self.model, self.view.key)

    async def _check_death(self) -> None:
        """Its load stream was lost, as by a reset of the network, or with the replica."""
        if not await self.liveness.is_alive():
            self.died()

    def refused(self, reason: Refusal) -> None:
        """The replica refused a request; its next report decides again."""
        if reason is Refusal.BUSY:
            self.full = True
        else:
            self.open = False
            self._reach()

    def cannot_load(self, adapter: str) -> None:
        """The replica refused a request since it could not load its ``adapter``."""
        self.adapters.failed(adapter)
        self._adapters_changed({adapter})  # the others were reported when they failed

    def _adapters_changed(self, refused: Set[str]) -> None:
        self._events.adapters(self.model, self.view.key, self.adapters.loaded, refused)
        if refused:
            self._events.unloadable(self.model, refused)

    def stuck_s(self, at: float) -> float:
        """For how many seconds it has made no progress on requests that it holds.

        Requests whose clients do not read are exempt, and those without a stream on a server that reports no
        tokens.
        """
        blind = self._feed is None and self.answering
        held = sum(not relay.held_back and (relay.streams or not blind) for relay in self.relays)
        return self._watchdog.stuck_s(held, (self.reads, self._tokens), at)

    def stale(self, at: float) -> bool:
        """Whether its last load report is older than :data:`STALE_S`."""
        return self.reported_at is not None and at - self.reported_at > STALE_S

    def age(self, at: float) -> None:
        """Drop a stale report; this host's own requests are counted here in any case."""
        if self.stale(at):
            self._in_flight_of_other_hosts = self._pending_of_other_hosts = 0
            self.view.kv_used = 0.0
            self.look()

    def _reach(self) -> None:
        self.breaker.reachable = self.answering and self.open and self.replica.state is ReplicaPhase.READY

    def subscribe(
        self, secret: str, on_change: Callable[[ReplicaHandle], None], *, multiplexed: bool = True
    ) -> None:
        """Follow the replica's load stream until :meth:`close`; ``multiplexed``: with requests beside it."""
        loop = asyncio.get_running_loop()

        def on_line(line: bytes) -> None:
            try:
                self.count(line, loop.time())
            except ValueError:  # an unreadable report counts as none
                self.set_answering(loop.time(), False)
            on_change(self)

        def on_down() -> None:
            assert self._feed is not None
            was_silent, self.silent = self.silent, self._feed.silent
            self._restarted = True
            at = loop.time()
            if (self.answering or was_silent) and not (
                self.silent or self._leaving or self.replica.state in _LEAVING
            ):
                self._death_check = loop.create_task(self._check_death())
            # A replica that makes progress is alive, whatever has become of its load stream.
            if self.answering and not (self.silent and self.mine and self.stuck_s(at) < STALE_S):
                self.set_answering(at, False)
                on_change(self)

        if multiplexed:
            self._frames = FrameChannel(self.pool, secret)
        self._feed = NdjsonStream(
            [self.url], "/internal/load", secret, self.pool.connect_timeout_s,
            on_line=on_line, on_down=on_down, connects=self._frames,
        )  # fmt: skip
        self._following = asyncio.create_task(self._feed.run())

    def close(self) -> None:
        """Send no more requests; those in flight continue on their own connections."""
        if self.cache is not None:
            self.cache.close()
        self._events.forgotten(self.model, self.view.key)
        self.answering = False
        self.health.leave(self.breaker)
        if self._following is not None:
            self._following.cancel()
        if self._frames is not None:
            self._frames.leave()
        self.pool.close()
