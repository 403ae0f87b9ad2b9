"""A capture has lengths, times, adapters and shared prefixes of served requests, and never text."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.protocol import body as bodies
from gateway.protocol.paths import ROUTES
from gateway.protocol.prompt_features import BLOCK_BYTES, grid_of
from gateway.protocol.usage import TokenUsage
from gateway.request_context import RequestContext
from gateway.telemetry import workload_capture_publisher as capturing
from gateway.telemetry.workload_capture_publisher import LIMITS, BufferLimits, CapturePublisher, CaptureRow
from gateway.telemetry.workload_capture_subscriber import QUIET_S, CaptureSubscribers, Pseudonyms
from policy.request import Request
from store.state_dir import StateDir
from tests.gateway.fake_replica import Exchange, stream
from tests.gateway.worker import Stack, until
from tidegate.replay.http_client import SILENT_AFTER_S

COMPLETE = ROUTES["/v1/completions"]
# Datagrams that wait in a socket.
QUEUED = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
USAGE = TokenUsage(prompt=1200, cached=0, completion=7)


def density(_: str) -> float:
    return 4.0


def end_call(
    capture: CapturePublisher,
    prompt: str = "a",
    *,
    path: str = "/v1/completions",
    usage: TokenUsage | None = USAGE,
    began: float | None = None,
    **more: Any,
) -> None:
    """A call of this prompt has ended."""
    raw = json.dumps({"model": "alpha", "prompt": prompt, "input": prompt}).encode()
    call = RequestContext(ROUTES[path], {"headers": []}, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    call.usage = usage
    request = Request("alpha", **more)
    capture.ended(call, request, bodies.read(raw), raw, monotonic() if began is None else began)


async def received(lines: AsyncIterator[bytes], count: int) -> list[dict[str, Any]]:
    """The next ``count`` lines."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        found += [json.loads(line) for line in (await anext(lines)).splitlines()]
    return found


class Site:
    """Some workers of a host, and a subscriber."""

    def __init__(
        self,
        place: Path,
        kept: BufferLimits = LIMITS,
        behind: BufferLimits = LIMITS,
        *,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.place = place
        self.workers = [CapturePublisher(place, kept), CapturePublisher(place, kept)]
        # No worker has to be waited for.
        self.listeners = CaptureSubscribers(place, density, behind, settle_s=0.0, quiet_s=quiet_s)
        self.lines = self.listeners.lines()

    async def listen(self) -> None:
        """Wait until every worker has found the subscriber."""
        (header,) = await received(self.lines, 1)
        assert header == {"tidegate": "capture", "version": 1, "block_tokens": 512}
        self.look()

    def look(self) -> None:
        for worker in self.workers:
            worker.look()

    def flush(self) -> None:
        for worker in self.workers:
            worker.flush()

    async def leave(self) -> None:
        await self.lines.aclose()  # type: ignore[attr-defined] # an async generator

    async def close(self) -> None:
        for worker in self.workers:
            worker.close()
        await self.leave()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path / "captures")
    yield site
    await site.close()


async def test_a_subscriber_receives_rows_of_all_workers(site: Site) -> None:
    await site.listen()
    one, other = site.workers
    end_call(one, tenant="web", adapter="sql", session=5)
    end_call(other, usage=TokenUsage(completion=3, exact=False), prompt_tokens=90)
    site.flush()
    first, second = sorted(await received(site.lines, 2), key=lambda line: -line["input_tokens"])
    assert first.pop("at") >= 0 and second.pop("at") >= 0
    assert first.pop("session") > 0
    assert first == {
        "input_tokens": 1200, "output_tokens": 7, "model": "alpha", "adapter": "sql", "tenant": "web",
    }  # fmt: skip
    # Its client disconnected before the engine reported lengths.
    assert second == {"input_tokens": 90, "output_tokens": 3, "model": "alpha"}


async def test_rows_sent_before_the_end_are_received(site: Site) -> None:
    await site.listen()
    end_call(site.workers[0])
    for worker in site.workers:
        worker.close()
    site.listeners.close()
    assert len([line async for line in site.lines]) == 1
    assert list(site.place.iterdir()) == []


async def test_rows_are_not_kept_without_a_subscriber(site: Site) -> None:
    site.look()
    assert not any(worker.has_subscribers for worker in site.workers)
    await site.listen()
    assert all(worker.has_subscribers for worker in site.workers)
    await site.leave()
    site.look()
    assert not any(worker.has_subscribers for worker in site.workers)


async def test_only_generated_answers_are_captured(site: Site) -> None:
    await site.listen()
    worker = site.workers[0]
    end_call(worker, path="/v1/embeddings")
    end_call(worker, path="/v1/tokenize")
    end_call(worker, usage=None)
    end_call(worker, began=monotonic() - 60)  # it came before the capture began
    end_call(worker, usage=TokenUsage(1, 0, 2))
    site.flush()
    assert [line["input_tokens"] for line in await received(site.lines, 1)] == [1]


async def test_the_socket_of_a_dead_subscriber_is_removed(site: Site) -> None:
    site.place.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(site.place / f"dead{capturing.SUFFIX}"))
    site.look()
    assert site.workers[0].has_subscribers
    end_call(site.workers[0])
    site.flush()
    assert not site.workers[0].has_subscribers and list(site.place.iterdir()) == []


async def test_a_slow_subscriber_gets_the_count_of_lost_rows(tmp_path: Path) -> None:
    site = Site(tmp_path / "captures", BufferLimits(rows=3))
    await site.listen()
    for _ in range(5):
        end_call(site.workers[0])
    site.flush()
    *rows, last = await received(site.lines, 4)
    assert len(rows) == 3 and last == {"lost": 2}
    await site.close()


async def test_a_capture_without_requests_says_that_it_goes_on(tmp_path: Path) -> None:
    """Ten quiet minutes were taken for its end."""
    assert QUIET_S < SILENT_AFTER_S / 2
    site = Site(tmp_path / "captures", quiet_s=0.0)
    await site.listen()
    assert await received(site.lines, 2) == [{"lost": 0}, {"lost": 0}]
    end_call(site.workers[0])
    site.flush()
    line: dict[str, Any] = {"lost": 0}
    while "lost" in line:
        (line,) = await received(site.lines, 1)
    assert line["input_tokens"] == 1200
    await site.close()


async def test_the_hashes_that_wait_for_a_slow_subscriber_are_bounded(tmp_path: Path) -> None:
    prompt = "a" * BLOCK_BYTES * 10
    raw = json.dumps({"model": "alpha", "prompt": prompt, "input": prompt}).encode()
    hashes = len(grid_of(7, bodies.read(raw), COMPLETE, raw, most=1000))
    site = Site(tmp_path / "captures", BufferLimits(hashes=3 * hashes))
    await site.listen()
    for kept in (3, 3):
        for _ in range(5):
            end_call(site.workers[0], prompt)
        site.flush()
        *rows, last = await received(site.lines, kept + 1)
        assert len(rows) == kept and "lost" in last
    assert last == {"lost": 4}
    await site.close()


async def test_other_tasks_run_between_the_batches_of_a_capture(site: Site) -> None:
    await site.listen()
    rows = 3 * capturing.MAX_ROWS
    for _ in range(rows):
        end_call(site.workers[0])
    site.flush()
    for _ in range(10):  # all are read from the socket
        await asyncio.sleep(0)
    loop, turns = asyncio.get_running_loop(), [0]

    def turn() -> None:
        turns[-1] += 1
        loop.call_soon(turn)

    turn()
    sizes = []
    while sum(sizes) < rows:
        turns.append(0)
        sizes.append(len((await anext(site.lines)).splitlines()))
    assert sizes == [capturing.MAX_ROWS] * 3
    assert all(turns[2:])


@pytest.mark.parametrize("behind", [BufferLimits(rows=1), BufferLimits(hashes=1)], ids=["rows", "hashes"])
async def test_a_subscribers_buffer_is_bounded(tmp_path: Path, behind: BufferLimits) -> None:
    """What does not fit waits in its socket, then at the worker, and then is lost."""
    site = Site(tmp_path / "captures", BufferLimits(rows=1), behind)
    await site.listen()
    for number in range(1, QUEUED + 6):
        end_call(site.workers[0], "a" * BLOCK_BYTES, usage=TokenUsage(number, 0, 1))
        site.flush()
        await asyncio.sleep(0)
    found = await received(site.lines, 3)
    assert [line["input_tokens"] for line in found] == [1, 2, 3]
    site.flush()
    while "lost" not in found[-1]:
        found += await received(site.lines, 1)
    assert 0 < found[-1]["lost"] < 5
    await site.close()


def row(text: str, **more: Any) -> CaptureRow:
    """The record of a prompt by a worker, with four bytes per token."""
    raw = json.dumps({"model": "alpha", "prompt": text}).encode()
    grid = grid_of(7, bodies.read(raw), COMPLETE, raw, most=1000)
    fields = {"model": "alpha", "adapter": "", "tenant": "", "session": 0} | more
    return CaptureRow(at=0.0, input_tokens=len(text) // 4, output_tokens=1, grid=grid, **fields)


def test_prompts_share_the_blocks_of_what_they_begin_with() -> None:
    pseudonyms = Pseudonyms(density, b"key")
    common = "".join(f"word{number:04d} " for number in range(1000))
    one = pseudonyms.line(row(common + "x" * 4000), 0.0).blocks
    other = pseudonyms.line(row(common + "y" * 4000), 0.0).blocks
    shared = len(common) // (4 * 512)
    assert len(one) == len(other) == (len(common) + 4000) // (4 * 512)
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])
    assert all(0 < block < 2**53 for block in one)


def test_a_block_has_512_tokens_for_any_bytes_per_token() -> None:
    rows = row("z" * 40_000)
    for bytes_a_token in (2.0, 4.6, 8.0):
        blocks = Pseudonyms(lambda _, found=bytes_a_token: found, b"key").line(rows, 0.0).blocks  # type: ignore[misc]
        assert len(blocks) == min(10_000 // 512, int(len(rows.grid) * BLOCK_BYTES / (512 * bytes_a_token)))
        assert len(set(blocks)) == len(blocks)


def test_blocks_are_stable_while_density_is_learned() -> None:
    learned = iter((4.0, 5.0))
    pseudonyms = Pseudonyms(lambda _: next(learned), b"key")
    assert pseudonyms.line(row("z" * 9000), 0.0).blocks == pseudonyms.line(row("z" * 9000), 0.0).blocks


def test_captures_have_different_keys() -> None:
    rows = row("z" * 9000, session=3)
    one, other = Pseudonyms(density, b"one").line(rows, 0.0), Pseudonyms(density, b"other").line(rows, 0.0)
    assert one.blocks and not set(one.blocks) & set(other.blocks)
    assert one.session != other.session


@pytest.mark.process
async def test_a_capture_has_the_requests_of_all_workers_without_their_text(stack: Stack) -> None:
    await stack.start_controller()
    await asyncio.gather(stack.start_worker(0), stack.start_worker(1))
    replica = await stack.replica("r0", bound=64)
    replica.answer = count_tokens
    await stack.ready(replica)
    text: list[str] = []
    secret = "the words of a client " * 400

    async def captures_a_batch() -> bool:
        """Whether all of 24 requests are captured: not yet if a worker has not found the subscriber."""
        numbers = range(len(replica.hits), len(replica.hits) + 24)
        for number in numbers:  # each on a connection of its own: both workers get some
            body = {"model": "alpha", "prompt": secret, "seed": number, "stream": True}
            await stack.http.post("/v1/completions", json=body, headers={"connection": "close"})
        await asyncio.sleep(2 * capturing.LOOK_EVERY_S)
        return {json.loads(line)["output_tokens"] for line in text} >= {1 + number for number in numbers}

    async with stack.admin.stream("GET", "/admin/capture") as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["tidegate"] == "capture"

        async def collect() -> None:
            async for line in lines:
                text.append(line)

        collecting = asyncio.create_task(collect())
        await until(captures_a_batch)
        collecting.cancel()
        await asyncio.wait([collecting])
    assert not any("words" in line or "client" in line for line in text)
    captured = [json.loads(line) for line in text]
    assert {line["input_tokens"] for line in captured} == {3000}
    assert len({tuple(line["blocks"][:4]) for line in captured}) == 1
    # If the path of the state directory is too long for sockets, they are in another.
    captures = StateDir(stack.root).captures
    await until(lambda: not list(captures.iterdir()), "the subscriber has left")


async def count_tokens(exchange: Exchange) -> None:
    """Answer with as many output tokens as there were requests."""
    chunk = {
        "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3000, "completion_tokens": 1 + exchange.json["seed"]},
    }
    await stream(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")(exchange)
