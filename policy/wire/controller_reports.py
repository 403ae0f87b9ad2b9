"""Reports of gateways and replicas to the controller: totals, so that a lost report loses no counts."""

from __future__ import annotations

from typing import Any

import msgspec

from policy.engine.performance_model import Timing
from policy.engine.step_samples import StepSample
from policy.stats.histogram import BUCKETS
from policy.types import Priority

NONE = (0,) * BUCKETS


class PriorityReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The streams of one priority that were ``judged``, and how many of them were within its SLO."""

    judged: int = 0
    met_ttft: int = 0
    met_itl: int = 0
    met_both: int = 0


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model in one gateway worker: totals since its start, and the requests that wait and run now.

    ``arrived`` counts all requests, ``refused`` those without room or replica in time, ``ended`` those that a
    replica answered completely, over which tokens are summed. ``arrived_tokens`` are the prompt tokens of all
    that arrived, as estimated then; ``running_tokens`` those that the ``running`` answers have produced so
    far, as estimated of those that are no streams. ``ttft``, ``itl`` (the mean gap of a stream)
    and ``e2e`` count durations in the buckets of :mod:`policy.stats.histogram`, the first two of streams
    only. ``met_ttft``, ``met_itl`` and ``met_both`` of ``judged`` streams were within the SLO as it was when
    they ended; ``by_priority`` has these where priorities have SLOs of their own, and ``ttft`` is then of
    those with the strictest target. ``adapter_tokens`` are the tokens that were computed for each adapter:
    uncached ones of prompts, and output. ``in_flight`` requests are in the gateway, ``queued`` of them
    without a replica; the last of the others is expected to end in ``drain_s`` seconds.
    """

    arrived: int = 0
    arrived_tokens: int = 0
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
    running: int = 0
    running_tokens: int = 0
    drain_s: float = 0.0
    by_priority: dict[Priority, PriorityReport] = {}
    adapter_tokens: dict[str, int] = {}


class WaitingRequests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many ``requests`` of a tenant wait in a gateway worker for a replica of ``model``."""

    model: str
    priority: Priority
    tenant: str = ""
    requests: int = 0


class WorkerDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reports only while somebody looks at it: its last ``routes``, and who is ``waiting``.

    A route is one of `/admin/routes`.
    """

    routes: tuple[dict[str, Any], ...] = ()
    waiting: tuple[WaitingRequests, ...] = ()


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one gateway worker: once a second, and at once if a request waits for a model at zero.

    ``worker`` is unique to one process, ``number`` grows with each report. The totals cover ``since_s``
    seconds; the worker ends after its ``last`` report. The controller asks for the ``detail`` in its answers.
    """

    worker: str
    number: int
    since_s: float
    models: dict[str, ModelReport] = {}
    last: bool = False
    detail: WorkerDetail | None = None


class ReportAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's answer to a report: whether it ``wants_detail`` in the next ones."""

    wants_detail: bool = False


class EngineReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of an engine.

    ``preempted`` counts requests that lost their KV since the host started, ``deferred`` those passed over
    now (as for want of an adapter slot); ``steps`` are those since the last report. ``timing`` has its limits
    and its engine model if known; ``hardware`` is a short description.
    """

    preempted: int = 0
    deferred: int = 0
    steps: tuple[StepSample, ...] = ()
    timing: Timing | None = None
    hardware: str = ""


class GpuReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The GPUs of one replica: the sum of ``watts`` and total ``joules``, ``celsius`` of the hottest.

    ``throttled`` are NVML's clock-throttle reasons as text, ``reasons`` as bits. ``xid`` is the last error,
    of the GPU ``card``; errors of programs only if no GPU itself failed. ``clock_mhz`` is the clock of the
    slowest GPU, of at most ``clock_max_mhz``. ``memory_used`` and ``memory_total`` are bytes, in sum. The
    rest are totals since the driver was loaded, in sum: ``ecc_*`` errors of memory, bytes over PCIe and
    NVLink to (``*_rx``) and from the GPUs (``*_tx``), ``pcie_replays`` and ``nvlink_errors`` (CRC errors,
    replays and recoveries), with the last ones of a GPU that does not answer. 0 is also what a GPU or its
    driver does not count.
    """

    watts: float
    joules: float = 0.0
    celsius: float = 0.0
    throttled: str = ""
    reasons: int = 0
    xid: int = 0
    card: str = ""
    clock_mhz: int = 0
    clock_max_mhz: int = 0
    memory_used: int = 0
    memory_total: int = 0
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    pcie_tx: int = 0
    pcie_rx: int = 0
    pcie_replays: int = 0
    nvlink_tx: int = 0
    nvlink_rx: int = 0
    nvlink_errors: int = 0


# XIDs that are errors of the program and not of the card (from NVIDIA's device plugin for Kubernetes).
PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 109})


def is_of_card(xid: int) -> bool:
    """Whether an XID says that the card itself failed."""
    return xid > 0 and xid not in PROGRAM_XIDS
