"""Reports of gateways and replicas to the controller: totals, so that a lost report loses no counts."""

from __future__ import annotations

import msgspec

from policy.engine.model import Timing
from policy.engine.step_samples import StepSample
from policy.stats.histogram import BUCKETS

NONE = (0,) * BUCKETS


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model in one gateway worker: totals since the worker started, and what waits and runs now.

    ``arrived`` counts requests before any was refused, ``refused`` those for which there was no room or no
    replica in time, ``ended`` those that a replica answered whole with tokens of its own, over which
    ``input_tokens``, ``cached_tokens`` and ``output_tokens`` are summed. ``ttft``, ``itl`` (the mean gap of
    each stream) and ``e2e`` count durations in the buckets of :mod:`policy.stats.histogram`; the first two
    are of streams alone, since an answer that comes whole says nothing of its first token. ``met_ttft``,
    ``met_itl`` and ``met_both`` are how many of ``judged`` streams were within the model's objectives, as
    they were when each ended. ``in_flight`` are in the gateway, ``queued`` of them without a replica.
    """

    arrived: int = 0
    refused: int = 0
    ended: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    judged: int = 0
    met_ttft: int = 0
    met_itl: int = 0
    met_both: int = 0
    ttft: tuple[int, ...] = NONE
    itl: tuple[int, ...] = NONE
    e2e: tuple[int, ...] = NONE
    queued: int = 0
    oldest_s: float = 0.0
    in_flight: int = 0


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one gateway worker, once a second, and at once when a request waits for a model at zero.

    ``worker`` is unique to the life of one process, ``number`` grows with each report of it. It has counted
    for ``since_s`` seconds; after the ``last`` one it ends.
    """

    worker: str
    number: int
    since_s: float
    models: dict[str, ModelReport] = {}
    last: bool = False


class EngineReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of an engine.

    ``preempted`` counts requests that lost their KV since its host started, ``deferred`` those that are
    passed over now, as for an adapter that no slot is free for; ``steps`` are those since the last report.
    ``timing`` is what bounds its steps, and how fast it is if it knows; ``hardware`` what it runs on, in a
    few words.
    """

    preempted: int = 0
    deferred: int = 0
    steps: tuple[StepSample, ...] = ()
    timing: Timing | None = None
    hardware: str = ""


class PowerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cards of one replica: ``watts`` and ``joules`` (total) together, ``celsius`` of the hottest.

    ``throttled`` says why they run slower than they could, in NVML's words, and ``reasons`` in its bits;
    ``xid`` is the last error of one, called ``card``: of a program only where no card itself had any.
    """

    watts: float
    joules: float = 0.0
    celsius: float = 0.0
    throttled: str = ""
    reasons: int = 0
    xid: int = 0
    card: str = ""
