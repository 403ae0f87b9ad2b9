"""What telemetry and the record of usage cost where they are paid: to count a request, to relay an event.

``python loadtests/telemetry_cost.py [ROOT]`` measures the compiled modules of the checkout ROOT
(``scripts/install`` there), by default this one; compare two checkouts. Processor time, medians.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic, process_time_ns

COUNT, ROUNDS = 50_000, 15
EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":"tide"},"logprobs":null,"finish_reason":null}]}\n\n'
)
# Of later checkouts: what the network and the engine took.
LATER = {"round_trip_s": 0.0001, "engine_s": 0.018, "engine_span_s": 0.63, "handled_s": 0.001}


def nanoseconds(call: Callable[[], object]) -> float:
    """The processor time of one call."""
    found = []
    for _ in range(ROUNDS):
        began = process_time_ns()
        for _ in range(COUNT):
            call()
        found.append((process_time_ns() - began) / COUNT)
    return median(found)


async def measure() -> None:
    """Print both figures."""
    from gateway.delivery.relay import Relay  # noqa: PLC0415 - of the checkout that was asked for
    from gateway.http.asgi_exchange import SENT  # noqa: PLC0415
    from gateway.http.client import ClientConnection, ConnectionPool  # noqa: PLC0415
    from gateway.protocol.paths import ROUTES  # noqa: PLC0415
    from gateway.protocol.sse_validator import ChatValidator  # noqa: PLC0415
    from gateway.protocol.usage import Usage  # noqa: PLC0415
    from gateway.request_context import Call  # noqa: PLC0415
    from gateway.telemetry.metrics import ModelCounters  # noqa: PLC0415

    def nothing(*_: object) -> object:
        return SENT

    def call() -> Call:
        return Call(ROUTES["/v1/chat/completions"], {"headers": []}, nothing, nothing)  # type: ignore[arg-type]

    meter, ended = ModelCounters("m"), monotonic()
    served, began = call(), ended - 1.0
    served.outcome, served.queued_s, served.events, served.usage = "ok", 0.0005, 64, Usage(20, 0, 64)
    served.sent_at, served.first_byte_at, served.last_event_at = began + 0.001, began + 0.02, began + 0.66
    for name, seconds in LATER.items():
        with contextlib.suppress(AttributeError):
            setattr(served, name, seconds)
    request_ns = nanoseconds(lambda: meter.count(served, began, ended))
    streamed = call()
    streamed.streaming = True
    with contextlib.suppress(ImportError), tempfile.TemporaryDirectory() as folder:
        from gateway.intake.usage_journal import UsageJournal  # noqa: PLC0415
        from gateway.telemetry.structured_log import Log  # noqa: PLC0415
        from policy.request import Request  # noqa: PLC0415

        journal = UsageJournal(Path(folder), Log(0))
        streamed.charge = journal.charge(streamed, "team", "key-1", Request("m"))
    connection = ClientConnection(ConnectionPool("http://127.0.0.1:9", 1.0))
    relay = Relay(streamed, connection, ChatValidator(1), meter)
    relay.on_head(200, {b"content-type": b"text/event-stream"})
    framed = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
    event_ns = nanoseconds(lambda: relay.on_chunk(EVENT, framed))
    print(f"{request_ns:.0f} ns a request, {event_ns:.0f} ns an event")  # noqa: T201 - its result


def main() -> int:
    """Measure; returns 1 if the checkout is not compiled."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    sys.path.insert(0, str(root))
    from store import machine_code  # noqa: PLC0415

    if problem := machine_code.use():
        print(f"{root} is not compiled: {problem}", file=sys.stderr)  # noqa: T201
        return 1
    asyncio.run(measure())
    return 0


if __name__ == "__main__":
    sys.exit(main())
