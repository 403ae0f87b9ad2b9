"""What a decision may know: figures with their ages, as gateways and replicas told them.

:mod:`policy.wire.reports` has what they tell, :mod:`policy.signals.aggregator` makes these of it.
"""

from __future__ import annotations

import msgspec


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over the last so many seconds: of a rate per second, or of a level."""

    last_6_s: float
    last_20_s: float
    last_60_s: float
    last_600_s: float


class LatencyQuantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds over the last minute, of ``count`` that were measured."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts of the requests of the last minute met each objective, and both; 1 where none is set."""

    ttft: float = 1.0
    itl: float = 1.0
    both: float = 1.0


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What gateways say of one model, all of them together. The oldest of what counts is ``age_s`` old.

    ``arrivals`` are requests per second before any was refused, ``refused`` those that were. Of ``queued``
    requests in gateways the oldest waits for ``oldest_s``. ``concurrency`` counts requests that wait or run.
    Means per request over the last minute, or as much more (ten at most) as three hundred need to have ended:
    ``input_tokens``, of which the fraction ``hit`` was cached, and ``output_tokens``; 0 before any ended.
    ``idle_s`` is how long nobody asked, or had an answer coming.
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


class ReplicaSample(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica that serves says of itself, ``age_s`` ago.

    ``running`` and ``waiting`` requests in its engine, ``kv_used`` of its KV cache (0..1), ``tokens_per_s``
    scheduled, ``deferred`` of the waiting ones for a slot of an adapter, ``preempted_per_s`` requests that
    lost their KV. ``slowness`` is the time of its steps over what the model of its shape says (1: as it
    should be). ``watts`` and ``celsius`` of its cards together and of the hottest, ``None`` without a card
    that tells; ``throttled`` names why it runs slower than it could, if it does, and the error of a card.
    """

    id: str
    age_s: float
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    tokens_per_s: float = 0.0
    deferred: int = 0
    preempted_per_s: float = 0.0
    slowness: float = 1.0
    watts: float | None = None
    celsius: float | None = None
    throttled: str = ""


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured of one model; ``demand`` is ``None`` while no gateway told anything."""

    demand: Demand | None = None
    replicas: tuple[ReplicaSample, ...] = ()
