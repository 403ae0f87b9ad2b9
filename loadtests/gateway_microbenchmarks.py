"""The cost of parts of the gateway: ``python loadtests/gateway_microbenchmarks.py telemetry|limits [ROOT]``.

``telemetry``: to count a request, and to relay an event with the record of its usage. ``limits``: to admit
and settle a request with all four limits of key and tenant, and with none.

It measures the compiled modules of the checkout ROOT (``scripts/install`` there), by default this one.
Processor time, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic, process_time_ns

COUNT, ROUNDS = 50_000, 15
WORKERS = 2
EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":"tide"},"logprobs":null,"finish_reason":null}]}\n\n'
)


def nanoseconds(call: Callable[[], object]) -> float:
    """The processor time of one call."""
    found = []
    for _ in range(ROUNDS):
        began = process_time_ns()
        for _ in range(COUNT):
            call()
        found.append((process_time_ns() - began) / COUNT)
    return median(found)


async def telemetry(folder: Path) -> str:
    """The cost of a request that is counted, and of an event that is relayed and recorded."""
    from gateway.delivery.relay import Relay  # noqa: PLC0415 - of the checkout that was asked for
    from gateway.http.asgi_exchange import SENT  # noqa: PLC0415
    from gateway.http.http1_client import ConnectionPool, Http1ClientConnection  # noqa: PLC0415
    from gateway.intake.usage_journal import UsageJournal  # noqa: PLC0415
    from gateway.protocol.paths import ROUTES  # noqa: PLC0415
    from gateway.protocol.sse_validator import ChatValidator  # noqa: PLC0415
    from gateway.protocol.usage import TokenUsage  # noqa: PLC0415
    from gateway.request_context import RequestContext  # noqa: PLC0415
    from gateway.telemetry.metrics import ModelCounters  # noqa: PLC0415
    from gateway.telemetry.structured_log import StructuredLog  # noqa: PLC0415
    from policy.request import Request  # noqa: PLC0415

    def nothing(*_: object) -> object:
        return SENT

    def call() -> RequestContext:
        return RequestContext(ROUTES["/v1/chat/completions"], {"headers": []}, nothing, nothing)  # type: ignore[arg-type]

    meter, ended = ModelCounters("m"), monotonic()
    served, began = call(), ended - 1.0
    served.outcome, served.queued_s, served.events, served.usage = "ok", 0.0005, 64, TokenUsage(20, 0, 64)
    served.sent_at, served.first_byte_at, served.last_event_at = began + 0.001, began + 0.02, began + 0.66
    served.round_trip_s, served.engine_s, served.engine_span_s, served.handled_s = 0.0001, 0.018, 0.63, 0.001
    request_ns = nanoseconds(lambda: meter.count(served, began, ended))
    streamed = call()
    streamed.streaming = True
    streamed.charge = UsageJournal(folder, StructuredLog(0)).charge(Request("m"), "team", "key-1", "")
    connection = Http1ClientConnection(ConnectionPool("http://127.0.0.1:9", 1.0))
    relay = Relay(streamed, connection, ChatValidator(1), meter)
    relay.on_head(200, {b"content-type": b"text/event-stream"})
    framed = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
    event_ns = nanoseconds(lambda: relay.on_chunk(EVENT, framed))
    return f"{request_ns:.0f} ns a request, {event_ns:.0f} ns an event"


async def limits(folder: Path) -> str:
    """The cost of limits, with :data:`WORKERS` workers that count the same key and tenant."""
    from gateway.intake.principal import Principal, WorkerTenant  # noqa: PLC0415 - of that checkout
    from gateway.intake.rate_limiter import RateLimiter  # noqa: PLC0415
    from gateway.intake.shared_limits import SharedLimits  # noqa: PLC0415
    from policy.config.tenancy import AccessPolicy  # noqa: PLC0415

    limited = AccessPolicy(
        rpm_limit=1_000_000_000, tpm_limit=1_000_000_000_000, max_parallel_requests=100, max_budget=1e9
    )
    limiters = [RateLimiter(SharedLimits(folder / "limits.rows", row)) for row in range(WORKERS)]
    account = WorkerTenant("web", b"")
    principal = Principal(account, "key-0123456789abcdef", (limited, limited))
    for limiter in limiters:
        limiter.admit(principal, 1000, 1000).settle(500, 500, began=True)
    first = limiters[0]
    # Without limits a request only looks whether it has any.
    free = Principal(account, "key-0123456789abcdef", (AccessPolicy(), AccessPolicy()))
    limited_ns = nanoseconds(lambda: first.admit(principal, 1000, 1000).settle(500, 500, began=True))
    return f"{limited_ns:.0f} ns a request, {nanoseconds(lambda: free.limited):.0f} ns without limits"


def main() -> int:
    """Measure; returns 1 if the checkout is not compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("telemetry", "limits"))
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    options = parser.parse_args()
    root = options.root.resolve()
    sys.path.insert(0, str(root))
    from store import compiled_modules  # noqa: PLC0415

    if problem := compiled_modules.use():
        print(f"{root} is not compiled: {problem}", file=sys.stderr)  # noqa: T201
        return 1
    measure = limits if options.part == "limits" else telemetry
    with tempfile.TemporaryDirectory() as folder:
        print(asyncio.run(measure(Path(folder))))  # noqa: T201 - its result
    return 0


if __name__ == "__main__":
    sys.exit(main())
