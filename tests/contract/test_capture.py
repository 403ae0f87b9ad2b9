"""The capture lines of the gateway are read as a trace by the simulator."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import msgspec
import pytest

from policy.wire.capture import HEADER, CaptureLine
from sim.arrivals import Arrival
from sim.workload.traces.detect_format import open_trace
from sim.workload.traces.formats import captured
from store.state_dir import StateDir
from tests.gateway.worker import Stack, until
from tests.tidegate.replay.endpoint import Endpoint
from tidegate.replay.capture_to_trace import CaptureFile, in_order
from tidegate.replay.endpoint_api import RequestFormat
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.replay.replay_and_capture import capture, replay

FULL = CaptureLine(1.5, 1200, 7, "alpha", "sql", "web", 5, (11, 12))


@pytest.mark.parametrize("line", [FULL, CaptureLine(0.0, 1, 1)])
def test_a_capture_line_is_read_back_unchanged(line: CaptureLine, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(msgspec.json.encode(HEADER) + b"\n" + msgspec.json.encode(line) + b"\n")
    (arrival,) = open_trace(path)
    assert captured(arrival) == msgspec.structs.replace(line, at=0.0)


@pytest.mark.process
async def test_a_replayed_trace_is_captured_unchanged(tmp_path: Path) -> None:
    blocks = [(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 6), (7, 8, 9), (1, 2, 3, 4), ()]
    trace = [
        Arrival(number / 100, 512 * len(known) + 300 + number, 2 + number, blocks=known)
        for number, known in enumerate(blocks)
    ]
    endpoint, stack = Endpoint(), Stack(tmp_path)
    stack.models = [{"name": "base", "engine": "external", "urls": [endpoint.url]}]
    part, path = tmp_path / "part", tmp_path / "trace.jsonl"
    with endpoint.served():
        try:
            await stack.start_worker()
            await until(lambda: _serves(stack), "the endpoint is known")
            written = asyncio.Event()
            with part.open("wb") as file:
                spool = CaptureFile(file, written.set)
                token = StateDir(tmp_path).admin_token()
                capturing = asyncio.create_task(capture(stack.admin_url, token, spool, for_s=None))
                await written.wait()
                pool, request_format = ReplayConnectionPool(stack.url), RequestFormat()
                await replay(
                    trace, pool, request_format, seed=1, in_flight=8, record=None, on_row=lambda _: None
                )
                while spool.requests < len(trace) + 2:  # two were probes
                    written.clear()
                    await written.wait()
                capturing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await capturing
        finally:
            await stack.close()
    in_order(part, path)
    # Each has its own number of tokens, by which they are compared: a busy machine sends some out of order.
    found = sorted((arrival for arrival in open_trace(path) if arrival.output_tokens > 1), key=tokens)
    trace.sort(key=tokens)
    assert [arrival[1:3] for arrival in found] == [arrival[1:3] for arrival in trace]
    for (one, found_one), (other, found_other) in itertools.combinations(zip(trace, found, strict=True), 2):
        # Block ends are estimated from bytes: within one block.
        assert abs(_shared(one, other) - _shared(found_one, found_other)) <= 1
        assert bool(_shared(one, other)) == bool(_shared(found_one, found_other))


def tokens(arrival: Arrival) -> tuple[int, int]:
    return arrival.input_tokens, arrival.output_tokens


async def _serves(stack: Stack) -> bool:
    return any(each["admissible"] for each in (await stack.admin.get("/admin/fleet")).json()["replicas"])


def _shared(one: Arrival, other: Arrival) -> int:
    return sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(one.blocks, other.blocks, strict=False)
        )
    )
