"""What the gateway's network carries: the sizes are those of the engine's own streams."""

from __future__ import annotations

import pytest

from sim.planning.demand import CHUNK_BYTES, EVENT_BYTES, PACKET_BYTES, STREAM_BYTES, Demand, network
from tests.serve.sim_driver import client_of, engine_of, spec

DEMAND = Demand(
    requests=600,
    lasts_s=60.0,
    input_tokens=1000.0,
    output_tokens=200.0,
    busiest_s=0.0,
    peak_rps=10.0,
    peak_input_tokens_per_s=10_000.0,
    peak_output_tokens_per_s=2000.0,
)


async def streamed(tokens: int) -> int:
    """Bytes of a chat answer of the simulated engine, whose model is called ``base``."""
    body = {
        "model": "base",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    async with engine_of(spec()) as engine, client_of(engine) as client:
        return len((await client.post("/v1/chat/completions", json=body)).content)


async def test_an_event_has_the_bytes_that_the_engine_sends() -> None:
    short, long = await streamed(20), await streamed(220)
    each = (long - short) / 200
    assert each == pytest.approx(EVENT_BYTES, abs=1.5)
    assert short - 20 * each == pytest.approx(STREAM_BYTES, abs=20)


def test_what_goes_one_way_is_requests_and_streams() -> None:
    found = network(DEMAND, "base", 4, 50)
    assert found.streams == 2000 * (EVENT_BYTES + CHUNK_BYTES + PACKET_BYTES) + 10 * STREAM_BYTES
    assert found.requests > 4 * 10_000
    assert found.each_way == found.requests + found.streams
    assert (found.replica_in, found.replica_out) == (found.requests / 4, found.streams / 4)
    assert (found.streams_open, found.events_per_s) == (50, 2000.0)


def test_a_longer_name_is_in_every_event() -> None:
    short, long = (network(DEMAND, name, 4, 50).streams for name in ("base", "base" + 10 * "x"))
    assert long - short == 10 * 2000
