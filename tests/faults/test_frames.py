"""Faults of a connection with all streams of a worker to a replica: they end with it, others do not."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from struct import pack

import httpx
import psutil
import pytest

from policy.wire import frames
from policy.wire.headers import SECRET_HEADER
from tests.faults import faults
from tests.faults.faulty_upstream import FaultyUpstream
from tests.faults.harness import Harness
from tests.faults.live import MODEL, Live
from tests.faults.load_generator import quantile
from tests.gateway.fake_replica import DONE, SECRET, Answer, Exchange, event
from tests.gateway.worker import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
STREAMS = 6


@pytest.fixture(scope="module")
def way() -> str:
    return "frames"


def frame(sequence: int, *records: tuple[int, int, bytes], length: int | None = None) -> bytes:
    text = b"".join(pack(">BII", kind, number, len(data)) + data for kind, number, data in records)
    return pack(">II", 4 + len(text) if length is None else length, sequence) + text


def wrong(kind: str, sequence: int, number: int) -> bytes:
    """Bytes that break a connection whose next frame is ``sequence``, and which has the stream ``number``."""
    data = (frames.DATA, number, b"data: {}\n\n")
    return {
        "length": frame(sequence, data, length=frames.MAX_FRAME + 5),
        "sequence": frame(sequence + 1, data),
        "stream": frame(sequence, (frames.DATA, 1 << 31, b"x")),
        "kind": frame(sequence, (77, number, b"")),
        "second head": frame(sequence, (frames.HEAD, number, frames.head(200, []))),
        "half a frame": frame(sequence, data)[:-5],
    }[kind]


async def break_connection(one: FaultyUpstream, kind: str) -> None:
    """Send what is no frame on its connection, and close it where that alone breaks nothing."""
    (connection,) = one.connections
    encoder, number = connection._encoder, next(hit.exchange._stream.number for hit in one.open)  # type: ignore[union-attr,attr-defined]
    await until(lambda: encoder.empty, "its last load line is sent")
    connection.transport.write(wrong(kind, encoder._sequence, number))
    if kind == "half a frame":
        connection.transport.close()


@pytest.mark.parametrize(
    "kind",
    [
        "length",
        "stream",
        "half a frame",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("sequence", "kind", "second head")),
    ],
)
async def test_what_is_no_frame_ends_the_streams_of_its_connection(
    harness: Harness, model: str, kind: str
) -> None:
    finish = asyncio.Event()
    bad, good = await harness.fleet(model, 2, usual=faults.held(finish))
    async with harness.expect(model) as after:
        clients = await harness.streams(model, 2 * STREAMS, 3)
        hurt = [client for client in clients if client.reply.headers["x-tidegate-replica"] == bad.id]
        assert 0 < len(hurt) == len(bad.open) < len(clients)
        await break_connection(bad, kind)
        for client in hurt:
            reply = await client.end()
            assert reply.body.startswith(faults.tokens(3))
            assert reply.error is not None and reply.error["code"] == "stream_broken"
        await until(lambda: len(bad.aborted) == len(hurt), "the replica is rid of them")
        await until(lambda: len(bad.connections) == 1, "the gateway has connected again")
        finish.set()
        for client in set(clients) - set(hurt):
            assert (await client.end()).error is None
        assert await after.outcomes() == {"ok": len(clients) - len(hurt), "stream_broken": len(hurt)}
    assert not good.aborted


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_64_of_256_streams_that_read_slowly_do_not_delay_the_others(
    harness: Harness, model: str, idle_cores: None
) -> None:
    """Events have numbers: none is lost, doubled or out of order. A slow stream holds a window at most."""
    streams, slow, events, gap_s, rounds = 256, 64, 24, 0.5, 3
    usual = [event(f"{number} ") for number in range(events)]
    large = [event(f"{number} " + "x" * 150_000) for number in range(events)]

    def answer(texts: list[bytes]) -> Answer:
        async def paced(exchange: Exchange) -> None:
            await exchange.head(faults.EVENTS)
            began = time.monotonic()
            for number, text in enumerate(texts):
                await asyncio.sleep(max(0.0, began + number * gap_s - time.monotonic()))
                await exchange.chunk(text)
            await exchange.chunk(event(finish="stop") + DONE)
            await exchange.end()

        return paced

    await harness.fleet(model, 1, usual=answer(usual), faults={"large": answer(large)}, bound=streams)
    process = psutil.Process(harness.workers[0].pid)

    async def p99(count: int) -> float:
        """The ITL of ``count`` streams that are read as they come."""
        clients = [await harness.post(model, stream=True) for _ in range(count)]
        replies = await asyncio.gather(*(client.end() for client in clients))
        assert {reply.body for reply in replies} == {b"".join(usual) + event(finish="stop") + DONE}
        gaps = [b[0] - a[0] for reply in replies for a, b in itertools.pairwise(reply.arrivals)]
        return quantile(gaps, 0.99)

    async def beside() -> float:
        held = [await harness.post(model, "large", stream=True, window_bytes=4096) for _ in range(slow)]

        async def dribble() -> None:
            while True:
                for client in held:
                    await client.read(1024)
                await asyncio.sleep(1.0)

        reading = asyncio.create_task(dribble())
        found = await p99(streams - slow)
        memory.append(process.memory_info().rss)
        reading.cancel()
        for client in held:
            assert b"".join(large).startswith(client.reply.body)
            client.leave()
        return found

    async with harness.expect(model) as after:
        alone, with_slow, memory = list[float](), list[float](), list[int]()
        # What the others take is there already.
        await p99(streams - slow)
        before = process.memory_info().rss
        for _ in range(rounds):
            alone.append(await p99(streams - slow))
            with_slow.append(await beside())
        # The kernel's buffers may have room for all of a slow one's answer.
        outcomes = await after.outcomes()
        assert set(outcomes) == {"ok", "cancelled"}
        assert outcomes["cancelled"] >= rounds * slow / 2
    # The best of the rounds: other load of the machine may slow one.
    assert min(with_slow) <= 1.2 * min(alone)
    # A window, what the client's socket takes, and the pieces of both; and it does not grow.
    assert max(memory) - before < 64 * 2**20
    assert max(memory) - min(memory) < 8 * 2**20


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_disconnect_frees_the_engines_slot_500_times(tmp_path: Path) -> None:
    async with Live(tmp_path).running(1) as live:
        (replica,) = (await live.settle(1)).values()

        async def running() -> int:
            async with (
                httpx.AsyncClient(trust_env=False, headers={SECRET_HEADER: SECRET}) as client,
                client.stream("GET", f"{replica['url']}/internal/load") as lines,
            ):
                load = json.loads(await anext(lines.aiter_lines()))["load"]
                return int(max(load["in_flight"], load["running"]))

        await disconnect_500_times(live, running)


async def disconnect_500_times(live: Live, running: Callable[[], Awaitable[int]]) -> None:
    """Each disconnect frees its slot within a second, as the engines' count of ``running`` requests says."""
    visits, together = 500, 50

    async def runs(count: int) -> bool:
        return await running() == count

    async with live.expect(MODEL, {"cancelled": visits}, attempts=visits) as after:
        for _ in range(visits // together):
            clients = await live.streams(MODEL, together, 2, max_tokens=2000, ignore_eos=True)
            await until(lambda: runs(together), "all run")
            left_at = [client.leave(reset=bool(number % 2)) for number, client in enumerate(clients)]
            await until(lambda: runs(0), "no slot is taken")
            assert time.monotonic() - left_at[0] <= 1.0 + after.stalls.seconds
