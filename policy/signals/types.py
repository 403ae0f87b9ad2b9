"""The signals that a decision may use, with their ages.

:mod:`policy.signals.aggregator` computes them from :mod:`policy.wire.controller_reports`.
"""

from __future__ import annotations

import msgspec

from policy.types import Priority


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the last 6 to 600 seconds, of a rate per second or of a level."""

    last_6_s: float
    last_20_s: float
    last_60_s: float
    last_600_s: float


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The fractions of requests of the last minute that met each SLO target, and both; 1 without a target."""

    ttft: float = 1.0
    itl: float = 1.0
    both: float = 1.0


class LatencyQuantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles in seconds of the ``count`` durations of the last minute."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float


class PriorityShares(msgspec.Struct, frozen=True, kw_only=True):
    """The ``judged`` streams of one priority in the last minute, and the fractions that met its SLO."""

    judged: int
    met: Shares


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one model as seen by all gateways; the oldest report in it is ``age_s`` old.

    ``arrivals`` (requests per second) include the ``refused``. ``oldest_s`` is the age of the oldest of the
    ``queued`` requests. ``concurrency`` counts requests that wait or run. ``input_tokens`` (of which the
    fraction ``hit`` was cached) and ``output_tokens`` are means per request over the last minute, or up to
    ten minutes if fewer than 300 have ended; 0 before the first request. Few ended requests are filled up
    with assumed ones, and running ones count as far as they exceed the mean. ``idle_s`` is the time without
    requests. The last of the running requests is expected to end in ``drain_s``. ``by_priority`` has what met
    the SLO of each priority, where these have their own; ``ttft`` is then of those with the strictest target.
    """

    age_s: float
    arrivals: Rates
    refused: Rates
    concurrency: Rates
    queued: int = 0
    oldest_s: float = 0.0
    ttft: LatencyQuantiles | None = None
    itl: LatencyQuantiles | None = None
    e2e: LatencyQuantiles | None = None
    met: Shares = Shares()
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    hit: float = 0.0
    idle_s: float = 0.0
    drain_s: float = 0.0
    by_priority: dict[Priority, PriorityShares] = {}


class ReplicaSample(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one ready replica, reported ``age_s`` ago.

    ``running`` and ``waiting`` requests in its engine, of which ``deferred`` wait for an adapter slot;
    ``kv_used`` (0..1) of its KV cache; ``tokens_per_s`` scheduled; ``preempted_per_s`` requests. ``slowness``
    is its step time over that of the engine model. ``watts`` of all its GPUs and ``celsius`` of the hottest,
    ``None`` if unknown; ``throttled`` names GPU errors and reasons for throttling.
    """

    id: str
    age_s: float
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    watts: float | None = None
    celsius: float | None = None
    throttled: str = ""
    tokens_per_s: float = 0.0
    deferred: int = 0
    preempted_per_s: float = 0.0
    slowness: float = 1.0


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """The signals of one model; ``demand`` is ``None`` before the first report of a gateway."""

    demand: ModelDemand | None = None
    replicas: tuple[ReplicaSample, ...] = ()
